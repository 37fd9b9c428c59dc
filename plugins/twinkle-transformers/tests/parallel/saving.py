"""What each of several processes does with checkpoints of which each writes its part."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch
from jobs import batches, model, ready, share, state, train
from peft import LoraConfig
from torch.distributed.checkpoint import HuggingFaceStorageWriter as Writer

from twinkle_core.errors import CheckpointNotWritten, TwinkleError
from twinkle_core.mesh import DeviceMesh
from twinkle_core.ops.sharded import local
from twinkle_transformers.model import TransformersModel


class Saving:
    """Called in a process of its own."""

    def open_window(self, rank, world_size, folder, jobs):
        """A window of 3 is saved after 2 backwards and goes on, here and in a model that was made from the folder."""
        found = {}
        for name, spec in jobs.items():
            adapter, first, second = spec.get("adapter", ""), ready(spec), ready(spec)
            mesh, rows = first.engine.mesh, batches()
            mine = [list(share(batch, mesh.data_rank, mesh.data_world_size)) for batch in rows]
            for batch in mine[:5]:
                first.forward_backward(batch, adapter_name=adapter, gradient_accumulation_steps=3)
                first.clip_grad_and_step(0.5, adapter_name=adapter)
            path = first.save(name, folder, adapter_name=adapter, save_optimizer=True)
            second.resume_from_checkpoint(path, adapter_name=adapter)
            found[name] = {"path": path}
            for key, built in (("unbroken", first), ("resumed", second)):
                found[name][key] = self.close(built, adapter, mine[5])
        return found

    def close(self, built, adapter, batch):
        built.forward_backward(batch, adapter_name=adapter, gradient_accumulation_steps=3)
        norm = built.clip_grad_and_step(0.5, adapter_name=adapter)
        return {"norm": norm, "weights": state(built, adapter)}

    def go_on(self, rank, world_size, paths, jobs):
        """The open window of another mesh."""
        found = {}
        for name, spec in jobs.items():
            adapter, built = spec.get("adapter", ""), ready(spec)
            mesh = built.engine.mesh
            built.resume_from_checkpoint(paths[name], adapter_name=adapter)
            mine = list(share(batches()[5], mesh.data_rank, mesh.data_world_size))
            found[name] = self.close(built, adapter, mine)
        return found

    def nothing_is_gathered(self, rank, world_size, folder):
        """Save and resume while every way to a whole tensor is shut."""
        spec = {"sizes": {"fsdp_size": world_size}, "optimizer": "adamw"}
        built, other = ready(spec), ready(spec)
        train(built, "", batches()[:2])

        def shut(x):
            raise AssertionError("a whole tensor was asked for")

        cls = type(next(iter(built.get_state_dict().values())))
        full = cls.full_tensor
        cls.full_tensor = shut
        try:
            path = built.save("c", folder, save_optimizer=True, sharded=True)
            other.resume_from_checkpoint(path)
        finally:
            cls.full_tensor = full
        live = {k: local(v) for k, v in built.get_state_dict().items()}
        own = sum(v.nbytes for k, v in live.items() if k != "lm_head.weight")
        files = sorted(Path(path).glob("model-shards/*.safetensors"))
        return {"own": own, "files": [p.stat().st_size for p in files], "same": same(state(built), state(other))}

    def tied(self, rank, world_size, folder):
        """A step, a checkpoint of either form, another model from it, another step; tied, and with the tie broken."""
        found = {}
        for kind in ("llama", "untied"):
            for form in (False, True):
                built, rows = model({"fsdp_size": world_size}, kind), batches()
                built.set_optimizer("sgd", lr=0.1)
                built.add_metric("loss", is_training=True)
                train(built, "", rows[:1])
                path = built.save(f"{kind}{form}", folder, sharded=form)
                mesh = DeviceMesh.from_sizes(fsdp_size=world_size)
                again = TransformersModel(model_id=path, mixed_precision="no", device_mesh=mesh)
                reloaded = same(state(built), state(again))
                again.set_optimizer("sgd", lr=0.1)
                again.add_metric("loss", is_training=True)
                for each in (built, again):
                    train(each, "", rows[1:2])
                weights = state(again)
                names = ("lm_head.weight", "model.embed_tokens.weight")
                found[path] = {
                    "reloaded": reloaded,
                    "stepped": same(state(built), weights),
                    "one object": again.module.lm_head.weight is again.module.model.embed_tokens.weight,
                    "equal": torch.equal(*(weights[name] for name in names)),
                }
        built = model({"fsdp_size": world_size})
        try:
            built.add_adapter_to_model("a", LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
            found["copied"] = "made"
        except TwinkleError as error:
            found["copied"] = str(error)
        return found

    def damaged(self, rank, world_size, path, spec):
        """What resuming says, and whether anything has changed."""
        built = ready(spec)
        before = state(built)
        try:
            built.resume_from_checkpoint(path)
        except TwinkleError as error:
            return {"said": str(error), "kept": same(before, state(built)), "step": built.sessions[""].cur_step}
        return {"said": "", "kept": False, "step": -1}

    def disk_refuses(self, rank, world_size, folder):
        """One rank's disk is full; and something stands in the way."""
        built = ready({"sizes": {"fsdp_size": world_size}, "optimizer": "adamw"})
        train(built, "", batches()[:1])
        path = built.save("c", folder, save_optimizer=True, sharded=True)
        before = sorted((str(p), p.stat().st_mtime_ns) for p in Path(path).rglob("*"))
        said = []
        write = Writer.write_data

        def full(self, plan, planner):
            if rank == 1:
                raise OSError(28, "No space left on device")
            return write(self, plan, planner)

        Writer.write_data = full
        try:
            built.save("c", folder, save_optimizer=True, sharded=True)
        except CheckpointNotWritten as error:
            said.append(str(error))
        Writer.write_data = write
        if rank == 0:
            (Path(folder) / "d").write_text("in the way")
        try:
            built.save("d", folder, save_optimizer=True, sharded=True)
        except OSError as error:
            said.append(str(error))
        after = sorted((str(p), p.stat().st_mtime_ns) for p in Path(path).rglob("*"))
        left = sorted(p.name for p in Path(folder).iterdir())
        return {"said": said, "kept": before == after, "left": left, "again": built.save("e", folder, sharded=True)}

    def killed(self, rank, world_size, folder):
        """Rank 1 dies in the middle of writing over a checkpoint."""
        built = ready({"sizes": {"fsdp_size": world_size}, "optimizer": "adamw"})
        train(built, "", batches()[:1])
        built.save("c", folder, save_optimizer=True, sharded=True)
        train(built, "", batches()[1:2])
        if rank == 1:

            def die(self, plan, planner):
                os.kill(os.getpid(), signal.SIGKILL)

            Writer.write_data = die
        else:
            threading.Thread(target=lambda: (time.sleep(60), os._exit(3)), daemon=True).start()
        built.save("c", folder, save_optimizer=True, sharded=True)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
