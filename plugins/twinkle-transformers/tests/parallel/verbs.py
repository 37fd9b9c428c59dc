"""What each of several processes does with single verbs, and with what is refused."""

from __future__ import annotations

from pathlib import Path

import torch
from jobs import batches, by_hand, model, share, state
from peft import LoraConfig

from twinkle_core.errors import TwinkleError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.testing.toys import random_rows
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.testing import tiny_config


class Verbs:
    """Called in a process of its own."""

    def split(self, rank, world_size, meshes):
        """forward, calculate_loss and backward one after the other, with an evaluation between; by logps, and by hand."""
        found = {}
        for name, sizes in meshes.items():
            for kind, loss in (("logps", "cross_entropy"), ("hidden", by_hand)):
                built, seen = model(sizes), []
                built.set_loss(loss)
                built.set_optimizer("sgd", lr=0.1)
                mesh = built.engine.mesh
                for step, rows in enumerate(batches()[:3]):
                    if step:
                        built.forward_backward(list(share(rows, mesh.data_rank, mesh.data_world_size)))
                    built.forward_only(rows)  # the same rows on all
                    built.clip_grad_and_step()  # what the evaluation left in place is old then
                    built.forward_only(rows)
                    seen.append(built.calculate_loss())
                    built.forward(list(share(rows, mesh.data_rank, mesh.data_world_size)) or rows[:1])
                    if step == 1:
                        built.calculate_loss()
                    if step == 2:
                        built.get_state_dict()  # which looks at parts
                    built.backward()
                    seen.append(built.clip_grad_and_step())
                found[f"{name} {kind}"] = {"seen": seen, "weights": state(built)}
        return found

    def dropout(self, rank, world_size, meshes):
        """Processes that began with different seeds: what an adapter trains to, and what dropout makes of the same rows."""
        found = {}
        for name, sizes in meshes.items():
            torch.manual_seed(100 + rank)
            mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
            built = TransformersModel(config=tiny_config(), mixed_precision="no", device_mesh=mesh)
            config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.5)
            built.add_adapter_to_model("a", config)
            built.set_optimizer("sgd", lr=0.1)
            rows = random_rows([5, 7, 6, 5], vocabulary=250)
            drawn = built.forward(rows).logits.detach().clone()
            built.calculate_loss()
            built.zero_grad(drop=True)
            for _ in range(3):
                built.forward_backward(list(share(rows, mesh.data_rank, mesh.data_world_size)))
                built.clip_grad_and_step()
            held = {k: v.clone() for k, v in built.get_state_dict().items() if type(v) is torch.Tensor}
            found[name] = {"drawn": drawn, "data_rank": mesh.data_rank, "held": held}
        return found

    def refused(self, rank, world_size, folder):
        """What is said, and that the model goes on as if it had not been asked."""
        found = {}

        def ask(name, call):
            try:
                call()
                found[name] = "nothing"
            except TwinkleError as error:
                found[name] = str(error)

        rows = random_rows([5, 7], vocabulary=250)[rank:][:1]
        lora = LoraConfig(r=2, target_modules="all-linear")
        for name, sizes in (("tp", {"tp_size": world_size}), ("ep", {"ep_size": world_size, "dp_size": world_size})):
            built = model(sizes, "moe")
            before = state(built)
            ask(f"experts {name}", lambda built=built: built.add_adapter_to_model("a", lora))
            found[f"kept {name}"] = all(torch.equal(before[k], v) for k, v in state(built).items())
            built.add_adapter_to_model("a", LoraConfig(r=2, target_modules=["q_proj"]))
            built.set_optimizer("sgd", lr=0.1)
            built.forward_backward(rows if name == "ep" else random_rows([5], vocabulary=250))
            found[f"goes on {name}"] = built.clip_grad_and_step() > 0
        long = model({"dp_size": world_size, "ulysses_size": world_size})
        long.set_optimizer("sgd", lr=0.1)
        long.set_loss(by_hand)
        ask("hidden", lambda: long.forward_backward(random_rows([8], vocabulary=250)))
        long.apply_patch("embedding", pooling="mean")
        ask("embeddings", lambda: long.forward_only(random_rows([8], vocabulary=250), task="embedding"))
        long.set_loss("cross_entropy")
        long.forward_backward(random_rows([8], vocabulary=250))
        found["goes on ulysses"] = long.clip_grad_and_step() > 0
        mesh = DeviceMesh.from_sizes(tp_size=world_size)
        ask("unread", lambda: TransformersModel(model_id=Path(folder), mixed_precision="no", device_mesh=mesh))
        return found

    def between_layers(self, rank, world_size):
        """How many tokens modules see, of one row of 7; and what is said of a layer that mixes tokens of its own accord."""
        sizes, rows, seen = {"tp_size": world_size, "sequence_parallel": True}, random_rows([7], vocabulary=250), {}
        built = model(sizes, "normed")
        two = (built, model({"tp_size": world_size}, "normed"))
        found = {"texts": [m.generate(rows, return_rows=True, max_new_tokens=3)[0]["input_ids"] for m in two]}
        found["texts"], found["texts alone"] = found["texts"]
        built.set_optimizer("sgd", lr=0.1)
        try:
            built.forward_backward(random_rows([7], vocabulary=250, seed=rank))
            found["rows apart"] = "nothing"
        except TwinkleError as error:
            found["rows apart"] = str(error)
        block = built.module.model.layers[0]
        watched = {"input_layernorm": block.input_layernorm, "q_norm": block.self_attn.q_norm, "norm": built.module.model.norm}
        for again in (False, True):  # what is asked of the model once is over
            for name, module in watched.items() if again else ():
                module.register_forward_hook(lambda m, args, y, name=name: seen.update({name: args[0].shape[1]}))
            built.forward_backward(rows)
            built.zero_grad(drop=True)
        found["seen"] = seen
        mixes = model(sizes)
        norm = mixes.module.model.layers[0].input_layernorm
        own = norm.forward
        norm.forward = lambda x: own(x) + own(x).cumsum(1)
        before = state(mixes)
        mixes.set_optimizer("sgd", lr=0.1)
        try:
            mixes.forward_backward(rows)
            found["mixes"] = "nothing"
        except TwinkleError as error:
            found["mixes"] = str(error)
        found["same"] = all(torch.equal(before[k], v) for k, v in state(mixes).items())
        return found

    def apart(self, rank, world_size, sizes, folder):
        """Verbs that one rank calls alone, rows that are bad on one rank, and that all go on afterwards as if nothing was."""
        built = model(sizes)
        built.set_optimizer("sgd", lr=0.1)
        built.add_metric("loss")
        rows = random_rows([5, 7, 6, 5], vocabulary=250)
        mine, found = rows[rank::world_size], {}

        def ask(name, call):
            try:
                call()
                found[name] = "nothing"
            except TwinkleError as error:
                found[name] = f"{type(error).__name__}: {error}"

        alone = {
            "save": lambda: built.save("c", folder),
            "calculate_metric": lambda: built.calculate_metric(),
            "forward_only": lambda: built.forward_only(mine),
            "clip_grad_and_step": lambda: built.clip_grad_and_step(),
        }
        if "fsdp_size" in sizes:
            alone["generate"] = lambda: built.generate(mine, return_rows=True, max_new_tokens=2)
        built.forward_backward(mine, gradient_accumulation_steps=2)
        built.forward_backward(mine)
        for name, call in alone.items():
            ask(name, call if rank == 0 else lambda: built.forward(mine))
        ask("names", lambda: built.save(f"c{rank}", folder))
        other = model(sizes)
        other.set_optimizer("sgd", lr=0.1 * (1 + rank))
        other.forward_backward(mine)
        ask("rates", other.clip_grad_and_step)
        other.set_optimizer("sgd", lr=0.1)
        found["goes on"] = other.clip_grad_and_step()
        for name, given in (("ranks", {"r": 2 + rank}), ("targets", {"target_modules": ["q_proj", "v_proj"][: 1 + rank]})):
            config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **given})
            ask(name, lambda config=config: other.add_adapter_to_model("a", config))
        found["adapters"] = other.adapters.names()
        found["written"] = sorted(p.name for p in Path(folder).iterdir())
        bad = {
            "ids": {"input_ids": [999] * len(mine[1]["input_ids"])},
            "labels": {"labels": mine[1]["labels"][:-1]},
            "classes": {"labels": [999] * len(mine[1]["labels"])},
        }
        for name, change in bad.items():
            given = [mine[0], {**mine[1], **change}] if rank == 1 else mine
            ask(name, lambda given=given: built.forward_backward(given))
        built.engine.max_length = 6 if rank == 1 else None
        ask("long", lambda: built.forward_backward(mine if rank == 0 else random_rows([7], vocabulary=250)))
        ask("evaluated", lambda: built.forward_only(mine if rank == 0 else random_rows([7], vocabulary=250)))
        built.engine.max_length = None
        window = built.sessions[""].window
        found["window"] = (window.count, window.open)
        found["norm"] = built.clip_grad_and_step()
        found["loss"] = built.calculate_metric()["loss"]
        found["weights"] = state(built)
        return found

    def default_mesh(self, rank, world_size):
        """The mesh of ``initialize`` is that of models and loaders made later, unless they are given one."""
        import twinkle
        from twinkle_core.data.dataloader import DataLoader

        rows = random_rows([3] * 8, vocabulary=250)
        before = DataLoader(rows, batch_size=4)
        twinkle.initialize(global_device_mesh=DeviceMesh.from_sizes(fsdp_size=world_size))
        config = tiny_config()
        taken = TransformersModel(config=config, mixed_precision="no")
        given = TransformersModel(config=config, mixed_precision="no", device_mesh=DeviceMesh.from_sizes(dp_size=world_size))
        wrong = DeviceMesh.from_sizes(fsdp_size=world_size).at(rank)
        found = {
            "taken": taken.engine.layout.describe(),
            "given": given.engine.layout.describe(),
            "rows": [len(next(iter(loader))) for loader in (before, DataLoader(rows, batch_size=4))],
            "explicit": len(next(iter(DataLoader(rows, batch_size=4, device_mesh=DeviceMesh.from_sizes(tp_size=world_size))))),
            "same": taken.engine.mesh == wrong,
        }
        return found
