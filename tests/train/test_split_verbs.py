"""forward, calculate_loss, backward, forward_only: whose outputs are whose."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from twinkle_core.errors import (
    BadAdapter,
    DuplicateAdapter,
    LabelsMissing,
    LoraDisabled,
    NoForward,
    NoTemplate,
    NotInForward,
    UnknownAdapter,
    Unsupported,
    WhichAdapter,
    WrongArgument,
)
from twinkle_core.testing.adapters import ToyAdapters, ToyLinear
from twinkle_core.testing.engines import CallbackEngine, ToyEngine, session_model
from twinkle_core.testing.toys import TinyLM, random_rows, row
from twinkle_core.train.verbs import SessionModel


def tenants():
    """Two adapters with B_a = 3 and B_b = -1 over y = (2 + A B) x."""
    module = ToyLinear()
    model = SessionModel(ToyEngine(module), ToyAdapters(module))
    model.add_adapter_to_model("a", 3)
    model.add_adapter_to_model("b", -1)
    model.set_loss("mse", adapter_name="")
    return model, module


def point(x, y):
    return [row([y], [x])]


def test_B58_forwards_of_two_adapters_do_not_replace_each_other():
    """forward(a), forward(b), then loss and backward of each: loss a = 0, loss b = 4 with dB_b = 4."""
    model, module = tenants()
    model.forward(point(1, 5), adapter_name="a")
    model.forward(point(1, -1), adapter_name="b")
    assert model.calculate_loss(adapter_name="a") == 0.0
    model.backward(adapter_name="a")
    assert module.lora["a"]["B"].grad == 0 and module.lora["b"]["B"].grad is None
    assert model.calculate_loss(adapter_name="b") == 4.0
    model.backward(adapter_name="b")
    assert module.lora["b"]["B"].grad == 4 and module.lora["a"]["B"].grad == 0


def test_B58_an_evaluation_does_not_replace_a_training_forward():
    model, _ = tenants()
    model.forward(point(1, 5), adapter_name="a")
    assert model.forward_only(point(2, 5), adapter_name="a")["values"].item() == 10.0
    assert model.calculate_loss(adapter_name="a") == 0.0
    model.backward(adapter_name="a")
    with pytest.raises(NoForward):  # the evaluation came before the training that has been done meanwhile
        model.calculate_loss(adapter_name="a")


def test_an_evaluation_before_a_training_forward_is_not_taken_for_it():
    model, _ = tenants()
    for train in (
        lambda: (model.forward(point(1, 5), adapter_name="a"), model.backward(adapter_name="a")),
        lambda: model.forward_backward(point(1, 5), adapter_name="a"),
    ):
        model.forward_only(point(2, 5), adapter_name="a")
        train()
        with pytest.raises(NoForward):
            model.calculate_loss(adapter_name="a")


def test_an_evaluation_of_weights_that_have_changed_is_not_taken_for_one_of_these():
    model, _ = tenants()
    model.set_optimizer("sgd", lr=0.5, adapter_name="a")
    model.forward_backward(point(1, 5), adapter_name="a")
    model.forward_only(point(2, 5), adapter_name="a")
    assert model.calculate_loss(adapter_name="a") == 25.0
    model.clip_grad_and_step(adapter_name="a")
    with pytest.raises(NoForward):
        model.calculate_loss(adapter_name="a")


def through_the_output_layer():
    """A loss that runs the output layer itself."""

    def loss(inputs, outputs):
        return outputs.output_layer(outputs.hidden).sum()

    loss.needs = {"hidden"}
    return loss


def test_the_loss_of_an_evaluation_is_that_of_its_adapter_and_without_dropout():
    model, module = tenants()
    active, training = [], []

    class Layer(torch.nn.Identity):
        def forward(self, x):
            active.append(module.active)
            training.append(self.training)
            return super().forward(x)

    module.output_layer = Layer()
    model.set_loss(through_the_output_layer(), adapter_name="a")
    rows = point(1, 5)
    model.forward_only(rows, adapter_name="a", return_logits=False, disable_lora=True)
    assert model.calculate_loss(adapter_name="a") == 2.0
    model.forward_only(rows, adapter_name="a", return_logits=False)
    model.calculate_loss(adapter_name="a")
    model.forward(rows, adapter_name="a", return_logits=False)
    model.calculate_loss(adapter_name="a")
    assert active == ["", "a", "a"] and training == [False, False, True]


def test_a_loss_set_after_the_forward_needs_what_that_computed():
    model = session_model(TinyLM())
    for forward in (model.forward, model.forward_only):
        forward(random_rows([3]), return_logits=False)
        model.set_loss(through_the_output_layer())
        with pytest.raises(NotInForward, match=r"needs hidden.*did not compute"):
            model.calculate_loss()
        model.set_loss("cross_entropy")
        assert model.calculate_loss() > 0


def test_split_verbs_and_forward_backward_give_the_same_gradients():
    rows = random_rows([3, 5, 2])
    torch.manual_seed(1)
    a, b = TinyLM(), TinyLM()
    b.load_state_dict(a.state_dict())
    one, two = session_model(a), session_model(b)
    loss = one.forward_backward(rows)
    two.forward(rows, return_logits=False)  # as forward_backward: logps without all logits
    assert two.calculate_loss() == pytest.approx(float(loss))
    two.backward()
    assert one.sessions[""].window.weight == two.sessions[""].window.weight
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad)


def test_backward_without_calculate_loss_computes_it_and_counts_one():
    model = session_model(TinyLM())
    model.forward(random_rows([3]))
    model.backward()
    assert model.sessions[""].window.count == 1


def test_each_forward_has_one_backward():
    model = session_model(TinyLM())
    with pytest.raises(NoForward, match="call forward"):
        model.backward()
    with pytest.raises(NoForward):
        model.calculate_loss()
    model.forward(random_rows([3]))
    model.backward()
    with pytest.raises(NoForward, match="one backward"):
        model.backward()
    assert model.sessions[""].window.count == 1


def test_a_backward_that_fails_drops_the_window_and_says_so():
    module = TinyLM()
    model = session_model(module)
    model.forward_backward(random_rows([3]), gradient_accumulation_steps=3)
    model.forward(random_rows([4]), return_logits=False)
    handle = module.mix.register_full_backward_hook(lambda *args: (_ for _ in ()).throw(ZeroDivisionError("mine")))
    model.forward(random_rows([4]), return_logits=False)
    with pytest.raises(ZeroDivisionError) as caught:
        model.backward()
    handle.remove()
    assert any("(1 backward(s) before this one) were dropped" in note for note in caught.value.__notes__)
    assert model.sessions[""].window.count == 0 and all(p.grad is None for p in module.parameters())
    with pytest.raises(NoForward):
        model.backward()


def test_loss_arguments_of_calculate_loss():
    model = session_model(TinyLM())
    model.set_loss(lambda inputs, outputs, *, factor: outputs.logits.mean() * factor)
    model.forward(random_rows([3]))
    with pytest.raises(WrongArgument, match="factor"):
        model.calculate_loss(facto=1)
    with pytest.raises(TypeError, match="factor"):
        model.backward()
    one = model.calculate_loss(factor=1.0)
    assert model.calculate_loss(factor=2.0) == pytest.approx(2 * one)
    assert model.calculate_loss() == pytest.approx(2 * one)
    model.backward()


def test_an_engine_that_cannot_split_says_what_to_call():
    model = session_model(TinyLM(), CallbackEngine)
    for verb in (lambda: model.forward(random_rows([2])), model.backward):
        with pytest.raises(Unsupported, match=r"CallbackEngine has no .*forward_backward"):
            verb()
    with pytest.raises(Unsupported, match="generate"):
        model.generate(random_rows([2]))
    assert model.forward_only(random_rows([2])).logits.shape == (1, 2, 11)


# ------------------------------------------------------------------------------------------------ what is computed


def test_needs_are_the_union_and_nothing_else():
    model = session_model(TinyLM())
    rows = random_rows([3])
    model.forward_backward(rows, temperature=0.5, task="causal_lm")
    assert model.engine.calls[-1] == (frozenset({"logps"}), True, 0.5, "causal_lm")
    model.add_metric("accuracy", True)
    model.forward_backward(rows)
    assert model.engine.calls[-1][0] == {"logps", "predictions"}
    model.forward(rows)
    assert model.engine.calls[-1][0] == {"logps", "predictions", "logits"}
    model.set_loss("chunked_cross_entropy")
    model.forward(rows, return_logits=False)
    assert model.engine.calls[-1][0] == {"hidden", "predictions"}
    model.forward_only(rows, return_logits=False, task="x")
    assert model.engine.calls[-1] == (frozenset({"hidden"}), False, 1.0, "x")


def test_logits_are_there_when_asked_for():
    model = session_model(TinyLM())
    rows = random_rows([3, 4])
    assert model.forward(rows).logits.shape == (2, 4, 11)
    assert "logits" not in model.forward(rows, return_logits=False)
    assert model.forward(rows).logits.requires_grad
    out = model.forward_only(rows, return_logits=False)
    assert "logits" not in out and not out.logps.requires_grad
    assert not out.logps.is_inference(), "it may be used in a later loss"


def test_what_the_caller_does_to_an_output_does_not_reach_the_loss():
    model = session_model(TinyLM())
    out = model.forward(random_rows([3]))
    out.clear()
    assert model.calculate_loss() > 0


@pytest.mark.parametrize("engine", [ToyEngine, CallbackEngine])
def test_forward_only_has_no_dropout_and_puts_training_flags_back(engine):
    module = TinyLM(dropout=0.5)
    module.norm.eval()  # something that the user has set aside on purpose
    model = session_model(module, engine)
    flags = {name: m.training for name, m in module.named_modules()}
    rows = random_rows([3])
    assert torch.equal(model.forward_only(rows).logits, model.forward_only(rows).logits)
    assert {name: m.training for name, m in module.named_modules()} == flags
    with pytest.raises(Exception):  # noqa: B017  (whatever the module raises on ids out of range)
        model.forward_only([row([1], [999])])
    assert {name: m.training for name, m in module.named_modules()} == flags
    assert torch.is_grad_enabled()


def test_reference_outputs_may_be_used_in_a_loss():
    model = session_model(TinyLM())
    rows = random_rows([3, 4])
    reference = model.forward_only(rows, return_logits=False).logps

    def against(inputs, outputs, *, reference):
        return ((outputs.logps - reference) * reference).sum()

    against.needs = {"logps"}
    model.set_loss(against)
    model.forward_backward(rows, reference=reference, micro_batch_size=None)


def test_disable_lora_is_the_base_model_and_stays_out_of_the_metrics():
    model, module = tenants()
    model.add_metric("loss", False, adapter_name="a")
    with model.adapter("a"):
        assert model.forward_only(point(1, 5), disable_lora=True)["values"].item() == 2.0
        assert model.calculate_metric(False) == {}
        assert model.forward_only(point(1, 4))["values"].item() == 5.0
        assert model.calculate_metric(False) == {"loss": 1.0}
    assert module.active == ""


# ------------------------------------------------------------------------------------------------ inputs


def test_rows_without_labels_are_refused_by_a_loss_that_needs_them():
    model = session_model(TinyLM())
    rows = [{"input_ids": [1, 2], "length": 2}]
    with pytest.raises(LabelsMissing, match="CrossEntropyLoss needs 'labels', and the rows have only: input_ids, length"):
        model.forward_backward(rows)
    assert model.engine.calls == []
    assert model.forward(rows).logits.shape == (1, 2, 11), "logits alone need no labels"
    with pytest.raises(LabelsMissing):
        model.calculate_loss()
    model.add_metric("accuracy", False)
    assert set(model.forward_only(rows)) == {"logits"}


def test_conversations_without_a_template_are_refused():
    model = session_model(TinyLM())
    conversation = {"messages": [{"role": "user", "content": "hi"}]}
    for inputs in ([conversation], conversation):
        with pytest.raises(NoTemplate, match="set_template"):
            model.forward_backward(inputs)


# ------------------------------------------------------------------------------------------------ whose call it is


def test_which_adapter_a_call_means():
    model, _ = tenants()
    with pytest.raises(WhichAdapter, match="a, b"):
        model.forward(point(1, 1))
    with model.adapter("b") as name:
        assert name == "b" and model._session(None).name == "b"
        with model.adapter("a"):
            assert model._session(None).name == "a"
        assert model._session(None).name == "b"
        assert model._session("").name == ""
    with pytest.raises(UnknownAdapter, match=r"unknown adapter 'bb'. Did you mean 'b'"), model.adapter("bb"):
        pass
    model.remove_adapter("b")
    assert model._session(None).name == "a"
    model.remove_adapter("a")
    assert model._session(None).name == ""
    with pytest.raises(UnknownAdapter, match="none yet"):
        model.forward(point(1, 1), adapter_name="a")


def test_an_adapter_context_is_of_one_model_and_one_thread():
    model, _ = tenants()
    other, _ = tenants()
    found = []
    with model.adapter("a"):
        with pytest.raises(WhichAdapter):
            other._session(None)

        def look():
            try:
                found.append(model._session(None).name)
            except WhichAdapter as error:
                found.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert isinstance(found[0], WhichAdapter)


def test_a_second_adapter_of_one_name_leaves_the_live_one():
    model, module = tenants()
    model.set_optimizer("sgd", adapter_name="a")
    session = model.sessions["a"]
    with pytest.raises(DuplicateAdapter, match="'a' is there already"):
        model.add_adapter_to_model("a", 7)
    assert model.sessions["a"] is session and module.lora["a"]["B"] == 3


@pytest.mark.parametrize(("name", "config"), [("", 1), ("c", "nonsense"), (None, 1)])
def test_an_adapter_that_cannot_be_made_leaves_nothing(name, config):
    model, module = tenants()
    with pytest.raises(BadAdapter):
        model.add_adapter_to_model(name, config)
    assert list(model.sessions) == ["", "a", "b"] and list(module.lora) == ["a", "b"]


def test_an_adapter_that_is_removed_takes_all_its_state_along():
    model, _ = tenants()
    model.set_optimizer("sgd", lr=0.5, adapter_name="a")
    model.forward_backward(point(1, 0), adapter_name="a", gradient_accumulation_steps=4)
    model.remove_adapter("a")
    model.add_adapter_to_model("a", 3)
    session = model.sessions["a"]
    assert session.optimizer is None and session.window.size is None and session.window.count == 0
    with pytest.raises(BadAdapter):
        model.remove_adapter("")


def test_adapters_train_beside_each_other_as_if_alone():
    """Interleaved windows of different sizes, each with its own optimizer."""

    def run(names):
        model, module = tenants()
        for name in ("a", "b"):
            model.set_optimizer("sgd", lr=0.01, weight_decay=0.0, adapter_name=name)
        for i in range(6):
            for name, size in (("a", 2), ("b", 3)):
                if name in names:
                    model.forward_backward(point(1, i), adapter_name=name, gradient_accumulation_steps=size)
                    model.clip_grad_and_step(adapter_name=name)
        return {name: module.lora[name]["B"].item() for name in names}

    assert run(["a", "b"]) == run(["a"]) | run(["b"])


class Crowded(ToyEngine):
    """Notes when a second call comes in while one is computing."""

    inside, met = 0, False

    def forward(self, batch, needs, **how):
        self.inside += 1
        time.sleep(0.005)
        self.met |= self.inside > 1
        self.inside -= 1
        return super().forward(batch, needs, **how)


def test_threads_never_meet_inside_a_verb():
    """Two threads train two adapters at once; each finds its own adapter active in every forward."""
    model, module = tenants()
    model.engine = Crowded(module)
    for name in ("a", "b"):
        model.set_optimizer("sgd", lr=0.0, weight_decay=0.0, adapter_name=name)
    wrong = []

    def work(name, factor):
        with model.adapter(name):
            for _ in range(5):
                value = model.forward_only(point(1, 0))["values"].item()
                model.forward_backward(point(1, 0))
                model.clip_grad_and_step()
                if value != factor:
                    wrong.append((name, value))

    threads = [threading.Thread(target=work, args=args) for args in (("a", 5.0), ("b", 1.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and not model.engine.met and module.active == ""
    assert [model.sessions[name].cur_step for name in ("a", "b")] == [5, 5]


class Echo(ToyEngine):
    """Generates each prompt's ids backwards."""

    capabilities = frozenset({"split_step", "generate"})

    def generate(self, rows, *, times=1):
        return [list(reversed(r["input_ids"])) * times for r in rows]


def test_generate_needs_a_template_and_decodes_with_it():
    from twinkle_core.contracts.template import Template

    class Letters(Template):
        def encode(self, trajectory, *, add_generation_prompt=False):
            ids = [ord(c) - 96 for m in trajectory["messages"] for c in m["content"]]
            return {"input_ids": ids + [0] * add_generation_prompt, "labels": ids, "length": len(ids)}

        def check(self, trajectory):
            return None

        def decode(self, ids, **kwargs):
            return "".join(chr(i + 96) for i in ids)

        def parse(self, text):
            return {"role": "assistant", "content": text}

    model = session_model(TinyLM(), Echo)
    with pytest.raises(
        NoTemplate, match=r"generate\(\) gives texts(?s:.*)or take rows of ids: generate\(\.\.\., return_rows=True"
    ):
        model.generate([{"input_ids": [1]}])
    model.set_template(Letters)
    conversation = {"messages": [{"role": "user", "content": "abc"}]}
    assert model.generate(conversation, times=2) == ["`cba`cba"]
    with pytest.raises(WrongArgument, match=r"Echo.generate has no parameter 'time'. Did you mean 'times'"):
        model.generate(conversation, time=2)


# ------------------------------------------------------------------------------------------------ contexts


def test_a_disabled_context_is_the_session_over_the_base_model():
    """Of one adapter; the innermost context of that adapter counts; what would train is refused before anything changes."""
    model, module = tenants()
    model.add_metric("loss", False, adapter_name="a")
    with model.adapter("a", disable_lora=True):
        assert model.forward_only(point(1, 4))["values"].item() == 2.0
        assert model.forward_only(point(1, 4), adapter_name="b")["values"].item() == 1.0
        assert model.calculate_metric(False) == {}
        with pytest.raises(ZeroDivisionError), model.adapter("a", disable_lora=True):
            raise ZeroDivisionError
        assert model.forward_only(point(1, 4))["values"].item() == 2.0
        with model.adapter("a"):
            assert model.forward_only(point(1, 4))["values"].item() == 5.0
        assert model.forward(point(1, 4))["values"].item() == 2.0
        assert model.calculate_loss() == 4.0
        for verb in (model.backward, lambda: model.forward_backward(point(1, 4))):
            with pytest.raises(LoraDisabled, match="adapter 'a'"):
                verb()
    with pytest.raises(LoraDisabled):  # that forward was the base model's, wherever its backward is asked for
        model.backward(adapter_name="a")
    assert model.sessions["a"].window.count == 0 and module.active == ""
    model.forward_backward(point(1, 4), adapter_name="a")
    assert module.lora["a"]["B"].grad == 2.0


def test_a_disabled_context_of_the_base_model_is_the_base_model():
    model, module = tenants()
    with model.adapter("", disable_lora=True):
        assert model.forward_only(point(1, 4))["values"].item() == 2.0
    assert module.active == ""


class Aliases(ToyAdapters):
    """Calls the adapter 'a' 'slot' as well."""

    def known_as(self, name):
        return "a" if name == "slot" and "a" in self.module.lora else name


def test_a_store_may_know_an_adapter_by_another_name():
    """Verbs and contexts take it; the session is one."""
    module = ToyLinear()
    model = SessionModel(ToyEngine(module), Aliases(module))
    with pytest.raises(UnknownAdapter):
        model.forward_only(point(1, 4), adapter_name="slot")
    model.add_adapter_to_model("a", 3)
    model.add_adapter_to_model("b", -1)
    model.set_loss("mse", adapter_name="slot")
    model.forward_backward(point(1, 4), adapter_name="a")
    with model.adapter("slot"):
        model.forward_backward(point(1, 4))
    assert model.sessions["a"].window.count == 2
    with model.adapter("slot", disable_lora=True):
        assert model.forward_only(point(1, 4), adapter_name="a")["values"].item() == 2.0
    model.remove_adapter("slot")
    assert list(model.sessions) == ["", "b"]


def test_several_calls_may_be_one_turn():
    """``with model.turns``: a call of another thread waits until all are done."""
    model, _ = tenants()
    seen = []

    def other():
        model.forward_only(point(1, 4), adapter_name="b")
        seen.append("other")

    with model.turns:
        thread = threading.Thread(target=other)
        thread.start()
        while not model.turns.waiting:
            time.sleep(0.001)
        for _ in range(3):
            model.forward_only(point(1, 4), adapter_name="a")
            seen.append("mine")
    thread.join(timeout=30)
    assert seen == ["mine"] * 3 + ["other"]
