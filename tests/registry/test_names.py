"""When two spellings are one name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core import errors
from twinkle_core.errors import UnknownKind
from twinkle_core.known import KNOWN
from twinkle_core.names import PLURAL, SUFFIXES, closest, fold, kind_of, normalise
from twinkle_core.registry import Registry

WORDS = st.lists(st.from_regex(r"[a-z]{1,6}[0-9]?", fullmatch=True), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("kind", "spellings"),
    [
        ("loss", ("infonce", "InfoNCE", "info_nce", "info-nce", "InfonceLoss", "InfoNCELoss", "infonce_loss")),
        ("model", ("transformers", "TransformersModel", "transformers_model")),
        ("preprocessor", ("self_cognition", "SelfCognitionProcessor", "SelfCognitionPreprocessor")),
        ("scheduler", ("cosine_warmup", "CosineWarmup", "CosineWarmupScheduler")),
        ("metric", ("loss", "LossMetric")),
    ],
)
def test_one_name(kind, spellings):
    assert len({fold(kind, s) for s in spellings}) == 1


@pytest.mark.parametrize("kind", PLURAL)
def test_a_name_that_is_only_the_suffix_is_kept(kind):
    assert fold(kind, kind.title()) == kind


@given(st.sampled_from(sorted(PLURAL)), WORDS)
def test_every_way_to_write_words_is_one_name(kind, words):
    if any("".join(words[n:]) in SUFFIXES[kind] for n in range(len(words))):
        return
    plain = "_".join(words)
    camel = "".join(w.title() for w in words)
    suffix = SUFFIXES[kind][0].title()
    assert {fold(kind, s) for s in (plain, plain.upper(), "-".join(words), camel, camel + suffix, f"{plain}_{kind}")} == {
        "".join(words)
    }


def test_first_party_names_are_apart():
    keys = [
        (kind, fold(kind, word)) for (kind, name), (cls, _, _) in KNOWN.items() for word in {fold(kind, name), fold(kind, cls)}
    ]
    assert len(keys) == len(set(keys))


def test_kinds():
    assert {kind_of(plural) for plural in PLURAL.values()} == {kind_of(kind) for kind in PLURAL} == set(PLURAL)
    with pytest.raises(UnknownKind, match="Did you mean 'patches'"):
        kind_of("patchs")


def test_distributions_compare_as_the_package_index_does():
    assert normalise("Acme__Losses.x-Y") == "acme-losses-x-y"


def test_closest_ignores_case():
    assert closest("ADAMV", ["AdamW", "SGD"]) == "AdamW"
    assert closest("qqqq", ["AdamW", "SGD"]) is None


@pytest.mark.parametrize("name", ["", " ", "acme/foo", "a:foo"])
def test_a_name_that_could_never_be_asked_for_is_not_registered(name):
    with pytest.raises(errors.BadName, match="a name "):
        Registry(path=()).register("loss", name, int)


def test_none_is_no_component():
    with pytest.raises(errors.BadName, match="None is no component"):
        Registry(path=()).register("loss", "nothing", None)
