"""PeftAdapters: several adapters on one base, put back exactly, saved as PEFT writes them."""

from __future__ import annotations

import json
import warnings

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from twinkle_core.contracts.adapters import BASE
from twinkle_core.errors import BadAdapter, CheckpointMismatch, DuplicateAdapter, TwinkleError, UnknownAdapter
from twinkle_transformers.adapters import PeftAdapters
from twinkle_transformers.precision import Precision
from twinkle_transformers.rehearse import Trial
from twinkle_transformers.testing import ToyL, ToyLConfig
from twinkle_transformers.tree import plain_state, skeleton

QV = ["q_proj", "v_proj"]
METHODS = {
    "lora": LoraConfig(target_modules=QV),
    "all-linear": LoraConfig(target_modules="all-linear", r=4),
    "default targets": LoraConfig(),
    "regex": LoraConfig(target_modules=r".*layers\.0.*(q|k)_proj"),
    "dora": LoraConfig(target_modules=QV, use_dora=True),
    "rslora": LoraConfig(target_modules=QV, use_rslora=True),
    "patterns": LoraConfig(target_modules=QV, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 32}),
    "modules to save": LoraConfig(target_modules=QV, modules_to_save=["lm_head", "embed_tokens"]),
    "embedding": LoraConfig(target_modules=["embed_tokens", "q_proj", "lm_head"]),
    "tokens": LoraConfig(target_modules=QV, trainable_token_indices=[4, 5]),
    "parameters": LoraConfig(target_modules=QV, target_parameters=["mlp.gate_proj.weight"]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(target_modules=QV),
    "lokr": peft.LoKrConfig(target_modules=QV),
    "oft": peft.OFTConfig(target_modules=QV),
    "vera": peft.VeraConfig(target_modules=QV),
    "fourier": peft.FourierFTConfig(target_modules=QV, n_frequency=10),
    "hra": peft.HRAConfig(target_modules=QV),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "gaussian": LoraConfig(target_modules=QV, init_lora_weights="gaussian"),
    "orthogonal": LoraConfig(target_modules=QV, init_lora_weights="orthogonal"),
    "shira": peft.ShiraConfig(target_modules=QV, r=2),
}


def copy_of(state):
    return {k: v.clone() for k, v in state.items()}


def logits(module, ids):
    with torch.no_grad():
        return module(input_ids=ids).logits


def flags(module):
    return {name: p.requires_grad for name, p in module.named_parameters()}


def train_once(store, name, ids, lr=0.5):
    with store.activate(name):
        parameters = store.parameters(name)
        store.module(input_ids=ids).logits.pow(2).mean().backward()
        assert all(p.grad is not None for p in parameters.values())
        torch.optim.SGD(parameters.values(), lr).step()
    store.module.zero_grad()


@pytest.fixture(autouse=True)
def _peft_is_quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="peft")
        yield


@pytest.mark.parametrize("method", METHODS)
def test_each_method_trains_alone_leaves_the_base_and_goes_again(llama, ids, method, tmp_path):
    before, names = copy_of(llama.state_dict()), [n for n, _ in llama.named_modules()]
    base = logits(llama, ids)
    store = PeftAdapters(llama)
    store.acquire("a", METHODS[method])
    train_once(store, "a", ids)
    with store.activate("a"):
        trained = logits(llama, ids)
    assert not torch.equal(trained, base)
    store.acquire("b", METHODS[method])
    with store.activate(BASE):
        assert torch.equal(logits(llama, ids), base)
    assert all(torch.equal(v, before[k]) for k, v in store.state_dict(BASE).items())
    store.write("a", tmp_path)
    state = store.read("a", tmp_path)
    assert set(state) == set(store.state_dict("a"))
    assert not any("twinkle" in key for key in state)
    store.load_state_dict("b", state)
    with store.activate("b"):
        torch.testing.assert_close(logits(llama, ids), trained, rtol=0, atol=1e-6)
    store.release("a")
    store.release("b")
    assert [n for n, _ in llama.named_modules()] == names
    assert all(flags(llama).values())
    assert torch.equal(logits(llama, ids), base)


@pytest.mark.parametrize("method", METHODS)
def test_saved_adapter_loads_in_plain_peft(llama, untied, ids, method, tmp_path):
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(untied)
    store = PeftAdapters(module)
    store.acquire("lora", METHODS[method])
    train_once(store, "lora", ids)
    with store.activate("lora"):
        ours = logits(module, ids)
    store.write("lora", tmp_path)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(untied), tmp_path)
    torch.testing.assert_close(logits(plain, ids), ours, rtol=0, atol=1e-6)


def toy_l(weight=2.0):
    return PeftAdapters(ToyL(ToyLConfig(weight)))


def put(store, name, a, b):
    keys = {k: (a if "lora_A" in k else b) for k in store.state_dict(name)}
    state = store.state_dict(name)
    store.load_state_dict(name, {k: torch.as_tensor(v, dtype=torch.float32).expand(state[k].shape) for k, v in keys.items()})


def answer(store, name, x=1):
    with store.activate(name), torch.no_grad():
        return store.module(input_ids=torch.tensor([[x]])).logits.item()


def lora(**options):
    return LoraConfig(**{"r": 1, "lora_alpha": 1, "target_modules": ["lin"], **options})


def test_B08_turning_off_and_on_puts_back_what_was_found():
    """Leaving a block without adapter gives back the state found on entry, nested and after an exception."""
    store = toy_l()
    store.acquire("a", lora())
    put(store, "a", 1.0, 3.0)
    before = flags(store.module)
    with store.activate("a"):
        assert answer(store, "a") == 5.0
        with store.activate(BASE):
            assert answer(store, BASE) == 2.0
            with store.activate(BASE):
                pass
            x = torch.tensor([[1]])
            assert store.module(input_ids=x).logits.item() == 2.0
        assert store.module(input_ids=x).logits.item() == 5.0
        with pytest.raises(ZeroDivisionError), store.activate(BASE):
            raise ZeroDivisionError
        assert store.module(input_ids=x).logits.item() == 5.0
    assert flags(store.module) == before


@pytest.fixture(scope="module")
def crowd():
    """A model with adapters of several kinds, each changed, and what each answers."""
    from transformers import LlamaForCausalLM

    from twinkle_transformers.testing import tiny_config

    torch.manual_seed(0)
    ids = torch.randint(3, 200, (1, 5))
    store = PeftAdapters(LlamaForCausalLM(tiny_config(tie_word_embeddings=False)).eval())
    store.module.model.norm.weight.requires_grad_(False)
    configs = {"a": METHODS["lora"], "lora": METHODS["all-linear"], "head": METHODS["modules to save"]}
    for name, config in {**configs, "ref": LoraConfig(target_modules=QV, inference_mode=True)}.items():
        store.acquire(name, config)
        if name != "ref":
            train_once(store, name, ids)
    answers = {}
    for name in (BASE, *store.names()):
        with store.activate(name):
            answers[name] = logits(store.module, ids)
    return store, ids, answers


@settings(max_examples=40, deadline=None)
@given(nest=st.lists(st.sampled_from([BASE, "a", "lora", "head", "ref"]), max_size=6), fails=st.integers(0, 6))
def test_B08_any_nest_of_activations_is_undone(crowd, nest, fails):
    """Inside, the innermost answers; at each exit, also by an exception, everything is what it was at the entry."""
    store, ids, answers = crowd

    def state():
        return [(n, p.requires_grad) for n, p in store.module.named_parameters()], [m.training for m in store.module.modules()]

    def go(names):
        if not names:
            return
        found, outside = state(), logits(store.module, ids)
        try:
            with store.activate(names[0]):
                go(names[1:])
                assert torch.equal(logits(store.module, ids), answers[names[0]])
                if len(names) == fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert state() == found
        assert torch.equal(logits(store.module, ids), outside)

    go(nest)


def test_B08_a_frozen_adapter_stays_frozen_beside_a_trainable_one():
    """Trainability belongs to the adapter, not to being active."""
    store = toy_l()
    store.acquire("ref", lora(inference_mode=True))
    store.acquire("pol", lora())
    for name in ("ref", "pol", BASE, "pol"):
        with store.activate(name):
            assert store.parameters("ref") == {}
            trained = {id(p) for p in store.module.parameters() if p.requires_grad} - {id(store.module.lin.base_layer.weight)}
            assert trained == {id(p) for p in store.parameters("pol").values()}
    assert {id(p) for p in store.module.parameters() if p.requires_grad} == {id(p) for p in store.parameters("pol").values()}
    assert len(store.parameters("pol")) == 2


def test_B08_adding_to_a_model_in_eval_mode_starts_no_dropout():
    store = toy_l()
    store.module.eval()
    store.acquire("a", lora(lora_dropout=0.5))
    put(store, "a", 1.0, 3.0)
    assert not any(m.training for m in store.module.modules())
    assert {answer(store, "a") for _ in range(20)} == {5.0}


def test_B10_saved_adapter_has_plain_keys_and_loads_under_another_name(tmp_path):
    """Trained as a, loaded as z beside another adapter; a file with a missing or unknown key names it."""
    store = toy_l()
    store.acquire("a", lora())
    put(store, "a", 1.0, 0.6)
    store.write("a", tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert sorted(stored) == ["base_model.model.lin.lora_A.weight", "base_model.model.lin.lora_B.weight"]
    assert stored["base_model.model.lin.lora_B.weight"].item() == pytest.approx(0.6)
    store.release("a")
    store.acquire("other", lora())
    store.acquire("z", tmp_path)
    assert answer(store, "z") == pytest.approx(2.6)
    assert answer(store, "other") == 2.0
    for state, key in (
        ({k: v for k, v in stored.items() if "lora_B" not in k}, "lora_B"),
        ({**stored, "base_model.model.nope.lora_A.weight": torch.ones(1)}, "nope"),
        ({**stored, "base_model.model.lin.lora_B.weight": torch.ones(2, 1)}, "[2, 1]"),
    ):
        with pytest.raises(CheckpointMismatch, match=key.replace("[", r"\[")):
            store.load_state_dict("z", state)
        save_file(state, tmp_path / "adapter_model.safetensors")
        with pytest.raises(CheckpointMismatch, match=key.replace("[", r"\[")):
            store.acquire("new", tmp_path)
    assert store.names() == ["other", "z"]
    assert answer(store, "z") == pytest.approx(2.6)


@pytest.mark.parametrize(("rslora", "right"), [(False, 8.0), (True, 16.0)])
def test_B12_rank_alpha_and_scale_belong_to_the_adapter(rslora, right, tmp_path):
    """r=4, alpha=8, all ones: 8/4 times 4, with rank-stabilised scale 8/2 times 4; the files say so themselves."""
    store = toy_l(weight=0.0)
    store.acquire("tenant", lora(r=4, lora_alpha=8, use_rslora=rslora, target_modules="all-linear"))
    put(store, "tenant", 1.0, 1.0)
    assert answer(store, "tenant") == right
    store.write("tenant", tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(list(t.shape) for t in stored.values()) == [[1, 4], [4, 1]]
    assert (config["r"], config["lora_alpha"], config["use_rslora"], config["target_modules"]) == (4, 8, rslora, ["lin"])
    plain = PeftModel.from_pretrained(ToyL(ToyLConfig(0.0)), tmp_path)
    assert plain(input_ids=torch.tensor([[1]])).logits.item() == right


@pytest.mark.parametrize("name", ["a", "lora", "lora_A", "model", "weight", "default", "q_proj", "名字"])
def test_any_name_finds_its_own_tensors(llama, ids, name, tmp_path):
    """peft looks for a name inside parameter names, where these occur by themselves."""
    store = PeftAdapters(llama)
    store.acquire("other", METHODS["lora"])
    store.acquire(name, METHODS["modules to save"])
    train_once(store, "other", ids)
    with store.activate(name):
        assert torch.equal(logits(llama, ids), logits_without(llama, store, ids))
    train_once(store, name, ids)
    with store.activate(name):
        trained = logits(llama, ids)
    store.write(name, tmp_path)
    store.release(name)
    store.acquire(name, tmp_path)
    with store.activate(name):
        assert torch.equal(logits(llama, ids), trained)


def logits_without(module, store, ids):
    with store.activate(BASE):
        return logits(module, ids)


BAD = {
    "alpha that is no number": (LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=float("nan")), "lora_alpha=nan"),
    "alpha below 0": (LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=-8), "lora_alpha=-8"),
    "dropout that leaves nothing": (LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=1.0), "lora_dropout=1.0"),
    "unknown module": (LoraConfig(target_modules=["nope"]), "nope"),
    "rank 0": (LoraConfig(target_modules=QV, r=0), "r"),
    "rank -1": (LoraConfig(target_modules=QV, r=-1), "r"),
    "no linear": (LoraConfig(target_modules=["rotary_emb"]), "RotaryEmbedding"),
    "prompt": (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "PromptTuningConfig"),
    "prefix": (peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "PrefixTuningConfig"),
    "ada": (peft.AdaLoraConfig(target_modules=QV, total_step=10), "AdaLoraConfig"),
    "pissa": (LoraConfig(target_modules=QV, init_lora_weights="pissa"), "pissa"),
    "bias": (LoraConfig(target_modules=QV, bias="all"), "bias='all'"),
    "other method": (peft.IA3Config(target_modules=QV, feedforward_modules=[]), "IA3"),
    "no config": ({"r": 4}, "dict"),
    "replication": (LoraConfig(target_modules=QV, layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_made_is_told_before_the_model_is_touched(llama, ids, case):
    store = PeftAdapters(llama)
    store.acquire("a", METHODS["lora"])
    train_once(store, "a", ids)
    state, switches, tree = copy_of(llama.state_dict()), flags(llama), [(n, id(m)) for n, m in llama.named_modules()]
    config, told = BAD[case]
    with pytest.raises(BadAdapter, match=told):
        store.acquire("b", config)
    with pytest.raises(DuplicateAdapter, match="'a'"):
        store.acquire("a", METHODS["all-linear"])
    assert store.names() == ["a"]
    assert flags(llama) == switches
    assert [(n, id(m)) for n, m in llama.named_modules()] == tree
    assert all(torch.equal(v, state[k]) for k, v in llama.state_dict().items())


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "..", "a b", "a\\b", 3])
def test_names_with_separators_are_refused(llama, name):
    with pytest.raises(BadAdapter):
        PeftAdapters(llama).acquire(name, METHODS["lora"])


def test_unknown_adapter_and_missing_folder(llama, tmp_path):
    store = PeftAdapters(llama)
    store.acquire("alpha", METHODS["lora"])
    for call in (store.release, store.parameters, store.state_dict):
        with pytest.raises(UnknownAdapter, match="alpha"):
            call("alhpa")
    with pytest.raises(UnknownAdapter), store.activate("alhpa"):
        pass
    with pytest.raises(UnknownAdapter):
        store.release(BASE)
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(TwinkleError, match=str(folder)):
            store.acquire("b", folder)


def test_cut_adapter_file_is_told(llama, tmp_path):
    store = PeftAdapters(llama)
    store.acquire("a", METHODS["lora"])
    store.write("a", tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(TwinkleError, match=r"adapter_model\.safetensors"):
        store.acquire("b", tmp_path)
    assert store.names() == ["a"]


def test_modules_to_save_rest_with_the_adapter(llama, ids):
    """The base's own head answers for the base, and for an adapter that saves none."""
    base = logits(llama, ids)
    store = PeftAdapters(llama)
    store.acquire("head", LoraConfig(target_modules=QV, modules_to_save=["lm_head"]))
    store.acquire("plain", METHODS["lora"])
    train_once(store, "head", ids)
    for name in (BASE, "plain"):
        with store.activate(name):
            assert torch.equal(logits(llama, ids), base)
    with store.activate("head"):
        assert not torch.equal(logits(llama, ids), base)
        assert any(key.endswith("lm_head.weight") for key in store.parameters("head"))


def test_base_is_trained_by_base_and_rests_while_adapters_work(llama, ids):
    llama.model.norm.weight.requires_grad_(False)
    whole = flags(llama)
    store = PeftAdapters(llama)
    names = set(store.parameters(BASE))
    assert names == {n for n, flag in whole.items() if flag}
    store.acquire("a", METHODS["modules to save"])
    assert set(store.parameters(BASE)) == names
    with store.activate("a"):
        logits(llama, ids)
        assert not any(p.requires_grad for p in store.parameters(BASE).values())
    with store.activate(BASE):
        assert all(p.requires_grad for p in store.parameters(BASE).values())
        assert not llama.model.norm.weight.requires_grad
    assert not any(p.requires_grad for p in store.parameters(BASE).values())
    store.release("a")
    assert flags(llama) == whole


def test_frozen_weights_in_compute_type_and_adapters_in_fp32(llama):
    from transformers import LlamaForCausalLM

    from twinkle_transformers.testing import tiny_config

    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", torch.float32)):
        module = LlamaForCausalLM(tiny_config())
        store = PeftAdapters(module, Precision(kind))
        store.acquire("a", LoraConfig(target_modules=QV, modules_to_save=["norm"]))
        assert {p.dtype for p in module.parameters()} == {torch.float32}, "as stored, until something computes"
        with store.precision.autocast(torch.device("cpu")):
            assert {p.dtype for p in store.parameters(BASE).values()} == {dtype}
        assert {p.dtype for p in store.parameters("a").values()} == {torch.float32}
        assert module.model.rotary_emb.inv_freq.dtype == torch.float32


def test_what_must_stay_wide_does(llama):
    llama._keep_in_fp32_modules_strict = {"norm"}
    store = PeftAdapters(llama, Precision("bf16"))
    store.acquire("a", METHODS["lora"])
    store.precision.autocast(torch.device("cpu"))
    wide = {name for name, p in store.parameters(BASE).items() if p.dtype == torch.float32}
    assert wide == {"model.norm.weight"}


@pytest.mark.parametrize("method", ["all-linear", "shira", "modules to save"])
def test_same_seed_gives_the_adapter_of_plain_peft(llama, method):
    """Whatever is tried before the model is touched draws no random number from what comes after."""
    copy = skeleton(llama, weightless=False)
    torch.manual_seed(3)
    plain = PeftModel(copy, METHODS[method], "default")
    after = torch.rand(1)
    torch.manual_seed(3)
    store = PeftAdapters(llama)
    store.acquire("a", METHODS[method])
    assert torch.equal(torch.rand(1), after)
    reference = peft.get_peft_model_state_dict(plain, save_embedding_layers=False)
    assert all(torch.equal(v, reference[k]) for k, v in store.state_dict("a").items())


def test_what_is_trained_elsewhere_keeps_its_fp32(llama):
    precision = Precision("bf16")
    store = PeftAdapters(llama, precision)
    precision.master(store.parameters(BASE).values())
    store.acquire("a", METHODS["lora"])
    precision.autocast(torch.device("cpu"))
    assert {p.dtype for p in llama.parameters()} == {torch.float32}


#: methods that begin from values of the base model
BEGIN_FROM_BASE = {"dora", "modules to save", "tokens", "norms"}


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_later_adapter_begins_as_if_it_were_alone(untied, method, computed, kind):
    """The first one has the base narrowed; a second must begin from what the checkpoint stores, or be refused."""
    from transformers import AutoModelForCausalLM

    def fresh():
        module = AutoModelForCausalLM.from_pretrained(untied)
        generator = torch.Generator().manual_seed(1)
        for layer in module.model.layers:  # as they are after training: not 1
            layer.input_layernorm.weight.data += torch.rand(32, generator=generator)
        return PeftAdapters(module, Precision(kind))

    alone, beside = fresh(), fresh()
    same = METHODS[method]  # peft mixes no methods on one base
    first = LoraConfig(target_modules=["k_proj"]) if isinstance(same, LoraConfig) else same
    beside.acquire("a", first)
    if computed:
        beside.precision.autocast(torch.device("cpu"))
    torch.manual_seed(5)
    alone.acquire("b", METHODS[method])
    before = {k: p.dtype for k, p in beside.module.named_parameters()}
    torch.manual_seed(5)
    if computed and method in BEGIN_FROM_BASE:
        with pytest.raises(BadAdapter, match=rf"rounded to {kind}.*before the first forward"):
            beside.acquire("b", METHODS[method])
        assert beside.names() == ["a"]
        assert {k: p.dtype for k, p in beside.module.named_parameters()} == before
        return
    beside.acquire("b", METHODS[method])
    wanted, found = alone.state_dict("b"), beside.state_dict("b")
    assert set(wanted) == set(found)
    for key, tensor in wanted.items():
        assert tensor.dtype == found[key].dtype and torch.equal(tensor, found[key]), key
    base = {k: p.dtype for k, p in beside.module.named_parameters() if ".twinkle1" not in k and "base_layer" not in k}
    assert all(before.get(k, dtype) == dtype for k, dtype in base.items())


def test_values_of_a_base_model_that_narrowing_leaves_may_be_begun_from(llama):
    """A checkpoint in fp32 whose numbers are those of a bf16 one loses nothing."""
    with torch.no_grad():
        for p in llama.parameters():
            p.copy_(p.bfloat16().float())
    store = PeftAdapters(llama, Precision("bf16"))
    store.acquire("a", LoraConfig(target_modules=["k_proj"]))
    store.precision.autocast(torch.device("cpu"))
    store.acquire("b", LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj"]))
    copied = store.state_dict("b")["base_model.model.model.layers.0.mlp.down_proj.weight"]
    assert copied.dtype == torch.float32 and torch.equal(
        copied, plain_state(llama)["model.layers.0.mlp.down_proj.weight"].float()
    )


def test_adapters_that_never_computed_leave_the_base_model_as_it_is_stored(llama, tmp_path, caplog):
    before = copy_of(llama.state_dict())
    store = PeftAdapters(llama, Precision("bf16"))
    store.acquire("a", METHODS["lora"])
    store.release("a")
    store.precision.autocast(torch.device("cpu"))
    store.write(BASE, tmp_path)
    assert all(torch.equal(v, before[k]) for k, v in load_file(tmp_path / "model.safetensors").items())
    assert not caplog.records
    store.acquire("a", METHODS["lora"])
    store.precision.autocast(torch.device("cpu"))
    store.release("a")
    store.write(BASE, tmp_path)
    assert "of the base model are saved as adapters compute with them, rounded to bf16" in caplog.text
    store.precision.master(store.parameters(BASE).values())
    assert "load the model again to train it from the weights as they are stored" in caplog.text


def test_tied_embeddings_with_modules_to_save_are_refused_or_kept(tiny, ids, tmp_path):
    """B47 for LoRA: a copy of one of the two would part them."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(tiny)
    store = PeftAdapters(module)
    for saved in (["embed_tokens"], ["lm_head"]):
        with pytest.raises(BadAdapter, match="ensure_weight_tying"):
            store.acquire("a", LoraConfig(target_modules=QV, modules_to_save=saved))
    store.acquire("a", LoraConfig(target_modules=QV, modules_to_save=["embed_tokens"], ensure_weight_tying=True))
    for _ in range(2):
        train_once(store, "a", ids)
    with store.activate("a"):
        first, last = module.get_input_embeddings(), module.get_output_embeddings()
        assert torch.equal(first.weight, last.weight)
        ours = logits(module, ids)
    store.write("a", tmp_path)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path)
    torch.testing.assert_close(logits(plain, ids), ours, rtol=0, atol=1e-6)


def test_sequence_classification_trains_its_head(ids, tmp_path):
    from transformers import LlamaForSequenceClassification

    from twinkle_transformers.testing import tiny_config

    module = LlamaForSequenceClassification(tiny_config(num_labels=3)).eval()
    store = PeftAdapters(module)
    store.acquire("a", LoraConfig(target_modules=QV, task_type="SEQ_CLS"))
    assert "base_model.model.score.weight" in store.state_dict("a")
    train_once(store, "a", ids)
    store.write("a", tmp_path)
    torch.manual_seed(0)


def test_skeleton_shares_nothing(llama, ids):
    before, state = logits(llama, ids), copy_of(plain_state(llama))
    ghost = skeleton(llama)
    assert {p.device.type for p in ghost.parameters()} == {"meta"}
    assert [n for n, _ in ghost.named_modules()] == [n for n, _ in llama.named_modules()]
    PeftModel(ghost, METHODS["all-linear"], "x", low_cpu_mem_usage=True)
    assert not any("lora" in n for n, _ in llama.named_modules())
    assert not hasattr(llama, "peft_config")
    assert torch.equal(logits(llama, ids), before)
    assert all(torch.equal(v, state[k]) for k, v in plain_state(llama).items())


@pytest.mark.parametrize("others", [0, 1])
def test_failure_that_no_rehearsal_shows_is_taken_back(llama, ids, others, monkeypatch):
    """The device is full while the second of many layers is made."""
    store = PeftAdapters(llama)
    if others:
        store.acquire("a", METHODS["modules to save"])
        train_once(store, "a", ids)
    state, switches, tree = copy_of(llama.state_dict()), flags(llama), [(n, id(m)) for n, m in llama.named_modules()]
    made = []
    real = peft.tuners.lora.layer.LoraLayer.reset_lora_parameters

    def full(layer, name, init):
        made.append(name)
        weight = next(iter(layer.lora_A.values()), None)
        if len([n for n in made if n == made[-1]]) > 3 and (weight is None or weight.weight.device.type != "meta"):
            raise torch.OutOfMemoryError("full")
        return real(layer, name, init)

    monkeypatch.setattr(peft.tuners.lora.layer.LoraLayer, "reset_lora_parameters", full)
    monkeypatch.setattr("twinkle_transformers.adapters.rehearse", lambda *a: Trial(None, {}, []))
    with pytest.raises(torch.OutOfMemoryError):
        store.acquire("b", METHODS["all-linear"] if not others else METHODS["modules to save"])
    assert store.names() == ["a"] * others
    assert flags(llama) == switches
    if not others:
        assert [(n, id(m)) for n, m in llama.named_modules()] == tree
    assert all(torch.equal(v, state[k]) for k, v in llama.state_dict().items())
    monkeypatch.undo()
    store.acquire("b", METHODS["modules to save"])
    train_once(store, "b", ids)
