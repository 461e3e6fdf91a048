"""Reading a config: what it gives is what OmegaConf gives, and nothing in it runs, whatever it is."""

from __future__ import annotations

import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor import examination, yaml_text
from nemo_patches.tools.doctor.interpolations import UNKNOWN
from nemo_patches.tools.doctor.refused import DoctorError
from nemo_patches.tools.doctor.trees import walk

pytestmark = pytest.mark.one_nemo


def load(folder: Path, text: str, *overrides: str) -> reading.Config:
    path = folder / "config.yaml"
    path.write_text(text)
    return reading.load(path, overrides)


def refused(folder: Path, content: str | bytes, *overrides: str) -> str:
    """What a run of the doctor says of a file that it cannot read; it takes neither long nor much."""
    path = folder / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    start, before = (
        time.process_time(),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
    report = examination.examine(path, overrides, examination.chosen())
    assert report.exit_code == 2, report.findings
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
    assert str(path) in report.error or "override" in report.error
    assert "\n" not in report.error
    return report.error


# --- what it gives


INTERPOLATIONS = """\
name: nest
a: {b: 1, c: "${.b}", d: [1, "${...name}", {e: "${a.b}"}]}
copy: ${a}
text: pre-${name}-${a.b}
element: ${a.d[1]}
nested: ${a.${letter}}
letter: b
number: 1e-3
switch: yes
file: '{${name}:.3f}-{step}'
chain: ${text}
anchor: &x {k: [1, 2]}
again: *x
merged: {<<: *x, l: 3}
1: {of: "${letter}", yes: "${1.of}"}
"""


def test_interpolations_anchors_and_types_are_omegaconfs_own(tmp_path: Path) -> None:
    # OmegaConf reads keys that are numbers or switches as such, and cannot follow ${1.of}: here,
    # keys are text.
    expected: Any = OmegaConf.to_container(
        OmegaConf.create(INTERPOLATIONS.replace("${1.of}", "b")), resolve=True
    )
    expected["1"] = {"of": "b", "yes": "b"}
    del expected[1]
    config = load(tmp_path, INTERPOLATIONS)
    assert config.tree == expected
    assert config.broken == {}


NAMES = st.sampled_from(["a", "b", "c", "d"])
TEXTS = st.lists(
    st.one_of(st.sampled_from(["x", "-", "1"]), NAMES.map("${{{}}}".format)),
    min_size=1,
    max_size=3,
).map("".join)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, TEXTS, min_size=1))
def test_any_web_of_interpolations_gives_what_omegaconf_gives(
    tree: dict[str, str],
) -> None:
    source = yaml_text.parse(Path("x"), OmegaConf.to_yaml(OmegaConf.create(tree)))
    config = reading.with_overrides(source)
    for key in tree:
        try:
            expected = OmegaConf.create(tree)[key]
        except (OmegaConfBaseException, RecursionError):
            expected = UNKNOWN
        assert config.tree[key] == expected or config.tree[key] is expected
        assert config.tree[key] is not UNKNOWN or config.broken


def test_defaults_that_only_concern_hydra_itself_hide_nothing(tmp_path: Path) -> None:
    for entries in (
        "[_self_]",
        "[override hydra/launcher: basic]",
        "[_self_, hydra/job_logging: none]",
        "[]",
        "null",
    ):
        assert load(tmp_path, f"a: 1\ndefaults: {entries}\n").tree["a"] == 1
    for entries in (
        "[model/train_ds: x]",
        "[base]",
        "[override model: x]",
        "[_self_, 5]",
    ):
        assert "by Hydra of other files" in refused(
            tmp_path, f"a: 1\ndefaults: {entries}\n"
        )


def test_what_a_merge_would_bring_into_a_section_that_is_there_is_nowhere(
    tmp_path: Path,
) -> None:
    config = load(tmp_path, "x: &x\n  k: {b: 1}\nz:\n  <<: *x\n  k: {c: 2}\n")
    assert config.tree["z"] == {"k": {"c": 2}}
    assert config.get(("z", "k", "b")).line == 5


def test_where_each_value_comes_from(tmp_path: Path) -> None:
    config = load(tmp_path, "a:\n  b: 1\n  c:\n  - 5\n  - x: 6\n", "a.b=2", "+a.new=3")
    assert config.get(("a", "b")).origin == "override"
    assert config.get(("a", "new")).origin == "override"
    assert config.get(("a", "c", "1", "x")) == reading.Value("a.c.1.x", 6, "line 5")
    assert config.get(("a", "nope"), 7) == reading.Value("a.nope", 7, "default")


def test_what_is_to_be_given_later_is_unknown_and_no_fault(tmp_path: Path) -> None:
    config = load(
        tmp_path, "a: ???\nb: ${a}\nc: [1, '${b}/x']\nd:\n  e: ???\nf: ${d}\n"
    )
    assert config.tree == {
        "a": UNKNOWN,
        "b": UNKNOWN,
        "c": [1, UNKNOWN],
        "d": {"e": UNKNOWN},
        "f": {"e": UNKNOWN},
    }
    assert config.broken == {}
    assert not config.get(("b", "deeper")).known


# --- overrides


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.b=2", {"a": {"b": 2, "c": [1, 2]}}),
        ("a.b=null", {"a": {"b": None, "c": [1, 2]}}),
        ("a.b=", {"a": {"b": "", "c": [1, 2]}}),
        ("a.b=${a.c}", {"a": {"b": [1, 2], "c": [1, 2]}}),
        ("a.b='x=y'", {"a": {"b": "x=y", "c": [1, 2]}}),
        ("a={b:2}", {"a": {"b": 2, "c": [1, 2]}}),
        ("++a={d:2}", {"a": {"b": 1, "c": [1, 2], "d": 2}}),
        ("+a.c=[3]", {"a": {"b": 1, "c": [3]}}),
        ("~a.b=1", {"a": {"c": [1, 2]}}),
        ("a.b=inf", {"a": {"b": float("inf"), "c": [1, 2]}}),
        ("a.b=.inf", {"a": {"b": ".inf", "c": [1, 2]}}),
        ("hydra.run.dir=x", {"a": {"b": 1, "c": [1, 2]}}),
        ("hydra/job_logging=disabled", {"a": {"b": 1, "c": [1, 2]}}),
        ("+hydra.x.y=1", {"a": {"b": 1, "c": [1, 2]}}),
        (f"a.b={'x' * 5000}", {"a": {"b": "x" * 5000, "c": [1, 2]}}),
        ("a.c.1=5", {"a": {"b": 1, "c": [1, 5]}}),
        ("a.c=[3,4]", {"a": {"b": 1, "c": [3, 4]}}),
        ("+a.new.deep=1", {"a": {"b": 1, "c": [1, 2], "new": {"deep": 1}}}),
        ("++a.b={x:1,y:[true]}", {"a": {"b": {"x": 1, "y": [True]}, "c": [1, 2]}}),
        ("~a.b", {"a": {"c": [1, 2]}}),
    ],
)
def test_overrides_as_hydra_has_them(
    tmp_path: Path, override: str, expected: dict[str, Any]
) -> None:
    assert load(tmp_path, "a: {b: 1, c: [1, 2]}\n", override).tree == expected


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("a.bb=2", "Could not override 'a.bb'."),
        ("x.y=2", "To append to your config use +x.y=2"),
        ("a.b.c=2", "is not allowed"),
        ("~nope", "'nope' does not exist"),
        ("model/encoder=big", "chooses a file of a group"),
        ("=1", "is not allowed"),
        ("", "is not allowed"),
        ("+++a.b=1", "is not allowed"),
        ("~~a.b", "is not allowed"),
        ("a.b=[1", "is not allowed"),
        ("a.b=x=y", "is not allowed"),
        ("a.b=!!python/object/apply:os.system [id]", "is not allowed"),
        ("a.b=1,2", "a sweep"),
        ("a.b=range(1,3)", "a sweep"),
        ("a={c:2}", "Could not override 'a'."),
        ("+a.b=2", "An item is already at 'a.b'"),
        ("~a.b=2", "is 1 and not 2"),
        (f"a.b={'9' * 5000}", "is not allowed"),
        (f"a.b={'[' * 400}", "is not allowed"),
    ],
)
def test_overrides_that_do_not_fit(tmp_path: Path, override: str, said: str) -> None:
    assert said in refused(tmp_path, "a: {b: 1}\n", override)


@pytest.mark.parametrize(
    "order", ["<<: *x, c: 3, b: 2", "c: 3, b: 2, <<: *x", "<<: [*x, *y], b: 2, c: 3"]
)
def test_the_line_of_a_merged_key_is_that_of_the_value_that_counts(
    tmp_path: Path, order: str
) -> None:
    own = (
        ",\n".join(order.split(", "))
        if "[" not in order
        else "<<: [*x, *y],\nb: 2,\nc: 3"
    )
    config = load(
        tmp_path, f"x: &x\n  b: 1\n  d: 4\ny: &y {{d: 5}}\nz: {{\n{own}\n}}\n"
    )
    assert config.tree["z"] == {"b": 2, "c": 3, "d": 4}
    lines = {
        line: number for number, line in enumerate(config.source.text.splitlines(), 1)
    }
    assert config.get(("z", "b")).line == next(
        lines[line] for line in lines if line.startswith("b: 2")
    )
    assert config.get(("z", "d")).line == 3
    assert config.get(("z", "none")).line == 5


# --- nothing runs


def test_no_resolver_is_called_and_no_variable_of_the_environment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    calls: list[str] = []
    OmegaConf.register_new_resolver(
        "touch", lambda name: calls.append(name), replace=True
    )
    try:
        text = (
            "a: ${oc.env:A_SECRET}\nb: ${touch:x}\nc: pre-${a}\nname: touch\nd:"
            " ${${name}:x}\ne: ${oc.decode:'1'}\nf: '${oc.env:A_SECRET,default}'\ng:"
            " ${touch:${name}}\nh: {i: ['${touch:y}']}\nj: ${h}\n"
        )
        config = load(tmp_path, text, "+k=${touch:z}")
    finally:
        OmegaConf.clear_resolver("touch")
    assert calls == []
    assert "hunter2" not in str(config)
    assert all(config.tree[key] is UNKNOWN for key in "abcdefgk")
    assert config.tree["j"] == {"i": [UNKNOWN]}


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system [touch {marker}]",
        "!!python/name:os.system",
        "!!python/object/new:subprocess.Popen [[touch, {marker}]]",
        "!mine x",
    ],
)
def test_tags_are_refused(tmp_path: Path, value: str) -> None:
    marker = tmp_path / "marker"
    said = refused(tmp_path, f"b: 1\na: {value.format(marker=marker)}\n")
    assert ":2:" in said
    assert "could not determine a constructor for the tag" in said
    assert not marker.exists()


def test_a_target_is_only_a_name(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    text = (
        "model: {encoder: {_target_: os.system, command: touch"
        f" {marker}}}}}\ntrainer: {{devices: 2}}\n"
    )
    path = tmp_path / "config.yaml"
    path.write_text(text)
    report = examination.examine(path, (), examination.chosen())
    assert not marker.exists()
    assert [
        rule.identifier for rule, _ in report.findings if rule.identifier == "NP101"
    ]


# --- whatever it is


def bomb(depth: int) -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, depth)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [1", "cannot be read"),
        ("a: 1\n  b: 2\n", ":2:"),
        ("a: b: c", "cannot be read"),
        ("\ta: 1", "cannot be read"),
        ("a: 1\n---\nb: 2\n", "cannot be read: but found another document"),
        ("a: *nowhere\n", "undefined alias"),
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("- a\n- b\n", "the top level is a sequence"),
        ("just text", "the top level is a scalar"),
        (
            "a: 1\nb: 2\na: 3\n",
            ":3:1: cannot be read: a is there twice, first in line 1",
        ),
        ("a: {b: 1, b: 2}\n", "b is there twice"),
        ("? [a, b]\n: 1\n", "expected a scalar node, but found sequence"),
        ("a: ${b\n", ":1: a is no interpolation"),
        ("x: 1\na: [{b: '${}'}]\n", ":2: a.0.b is no interpolation"),
        (b"\x80\x81\xff", "not text"),
        (b"a: \x00\n", "cannot be read"),
        (bytes(range(256)) * 40, "not text"),
        ("a: 1\n" * 2_000_000, "more than 1048576 bytes; a config may have no more"),
        ("a: " + "[" * 400_000, "nested deeper than 50"),
        ("a: " + "{b: " * 100_000, "nested deeper than 50"),
        ("".join(f"{i}:\n" for i in range(90_000)), "more than 50000 values"),
        (bomb(12), "more than 50000 values, when its aliases are followed"),
        ("a: &x [*x]\n", "nested deeper than 50"),
        ("a: &x {<<: *x}\n", "<< merges a mapping into itself"),
        ("b: &y {k: 1}\na: {<<: 5}\n", "but found scalar"),
        (
            "a: 1\ndefaults:\n- _self_\n- model: conformer\n",
            ":2: composed by Hydra of other files, which are not read",
        ),
        (f"a: 1\nb: {'9' * 5000}\n", "cannot be read: exceeds the limit"),
        (f"a: 1\nb: 0x{'f' * 5000}\n", "a number of 5002 digits, in line 2"),
    ],
    ids=range(29),
)
def test_what_is_no_config_is_refused_with_its_place(
    tmp_path: Path, content: str | bytes, said: str
) -> None:
    assert said.lower() in refused(tmp_path, content).lower()


def test_a_chain_in_the_worst_order_ends_in_time(tmp_path: Path) -> None:
    start = time.process_time()
    config = load(
        tmp_path, "\n".join([f"a{i}: ${{a{i + 1}}}" for i in range(200)] + ["a200: x"])
    )
    assert time.process_time() - start < 20
    assert config.tree["a195"] == "x"
    assert config.tree["a0"] is UNKNOWN
    assert "through too many others" in config.broken[("a0",)]


PATHS = st.sampled_from(
    [
        "a",
        "b",
        "k.a",
        "k.b",
        "l.0",
        "l.1.a",
        "l[1]",
        "k.l.01",
        "${a}",
        "k.${a}",
        "k.${k.a}",
        "${k}",
        "l.${b}",
        ".a",
        "..b",
    ]
)
TEXTS = st.one_of(
    st.sampled_from(["a", "b", "k", "l", "1", "k.a", "xa", "", 1, None, True]),
    PATHS.map("${{{}}}".format),
    PATHS.map("x${{{}}}".format),
    st.tuples(PATHS, PATHS).map("${{{0[0]}}}-${{{0[1]}}}".format),
)
LEAVES = st.dictionaries(
    st.sampled_from(["a", "b", "xa", "a-b", "1"]), TEXTS, max_size=4
)


def value_at(node: Any, keys: tuple[str, ...]) -> Any:
    """What OmegaConf gives there; UNKNOWN where it cannot tell."""
    try:
        for key in keys:
            node = node[int(key) if OmegaConf.is_list(node) else key]
        return (
            OmegaConf.to_container(node, resolve=True)
            if OmegaConf.is_config(node)
            else node
        )
    except (OmegaConfBaseException, RecursionError):
        return UNKNOWN


@settings(max_examples=200, deadline=None)
@given(LEAVES, LEAVES, st.lists(st.one_of(TEXTS, LEAVES), max_size=3))
def test_any_path_leads_where_it_leads_in_omegaconf(
    top: dict[str, Any], inner: dict[str, Any], values: list[Any]
) -> None:
    tree = {**top, "k": {**inner, "l": values}, "l": [*values, inner]}
    config = reading.with_overrides(yaml_text.parse(Path("x"), yaml.safe_dump(tree)))
    there = OmegaConf.create(tree)
    for keys, own in walk(config.tree):
        if not isinstance(own, (dict, list)):
            expected = value_at(there, keys)
            # In a text, as no config has.
            has_a_section = isinstance(expected, str) and re.search(r"[{[]", expected)
            assert own == expected or has_a_section, keys


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("folder", "not a regular file"),
        ("pipe", "not a regular file"),
        ("nowhere", "No such file"),
    ):
        with pytest.raises(DoctorError, match=said):
            reading.load(tmp_path / name)
    with pytest.raises(DoctorError, match="not a regular file"):
        reading.load(Path("/dev/zero"))


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=60),
        st.text(alphabet="ab:{}[]-&*!?<>|'\"\n #,${}.?\t", max_size=60),
    )
)
def test_no_text_makes_it_raise_anything_else(text: str) -> None:
    try:
        reading.with_overrides(yaml_text.parse(Path("x"), text))
    except DoctorError as error:
        assert str(error).startswith("x")
