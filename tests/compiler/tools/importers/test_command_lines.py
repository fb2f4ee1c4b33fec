"""Arguments of shell scripts equal those that a shell passes to the program, wherever the script defines them."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.tools.importers.key_files import ComputedValue, parse_word
from compiler.tools.importers.shell_words import ARGUMENT, script
from dsl.messages.diagnostics import Source, SpecError

STUB = 'torchrun() { printf "%s\\0" "$@"; }\npython() { torchrun "$@"; }\n'  # prints its arguments


def read(text: str, **variables: str) -> dict[str, object]:
    """The arguments of a script in which each occurs once."""
    arguments, mistakes = script(Source("s.sh", text), variables)
    assert not mistakes, [str(item) for item in mistakes]
    for name, values in arguments.items():
        assert len(values) == 1, name
    return {name: values[0].value for name, values in arguments.items()}


def run(text: str) -> dict[str, object]:
    """The arguments that bash hands to `torchrun` of a script."""
    command = ["bash", "--norc", "-c", STUB + text]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": os.defpath}).stdout
    arguments: dict[str, object] = {}
    name, values = "", list[str]()
    for word in (*printed.split("\0")[:-1], "--"):
        if word == "--" or (match := ARGUMENT.fullmatch(word)):
            if name:
                arguments[name] = parse_word(" ".join(values)) if values else True
            if word != "--":
                assert match
                name, values = match[1].replace("-", "_"), [match[3]] if match[2] else []
        elif name and word != "pretrain_gpt.py":
            values.append(word)
    return arguments


CASES = {
    "a string on one line": 'A="--x 1 --y-z two"\ntorchrun pretrain_gpt.py $A --last 3',
    "a string on several lines": "A='\n  --x 1\n  --y 2\n'\ntorchrun pretrain_gpt.py $A",
    "a string with line ends behind backslashes": 'A=" \\\n --x 1 \\\n --y \\\n"\ntorchrun pretrain_gpt.py $A',
    "an array on one line": "A=(--x 1 --y)\ntorchrun pretrain_gpt.py ${A[@]} --z 3",
    "an array with comments": 'A=(\n  --x 1 # one\n  # --w 9\n  --y \'a b\' "c"\n)\ntorchrun pretrain_gpt.py "${A[@]}"',
    "holders behind each other": 'A="--x 1"; B=(--y 2); torchrun pretrain_gpt.py $A ${B[@]}',
    "a holder that grows": 'A="--x 1"\nA+=" --y 2"\nB=(--z 3)\nB+=(--w 4)\ntorchrun pretrain_gpt.py $A ${B[@]}',
    "a holder in a holder": 'A="--x 1"\nB="$A --y 2"\ntorchrun pretrain_gpt.py $B',
    "a launcher before the program": "torchrun --nproc_per_node 8 pretrain_gpt.py --x 1",
    "a flag before the program": "torchrun --standalone pretrain_gpt.py --x 1",
    "a file of Python as a value": "torchrun pretrain_gpt.py --config config.py --x 1",
    "a log": "torchrun pretrain_gpt.py --x 1 --y >/dev/null 2>&1; torchrun --x 1 --y",
    "a log of errors": "torchrun --x 1 2>/dev/null --y 2",
    "a pipe": "torchrun --x 1 | cat",
    "commands behind": "torchrun --x 1 && true\ntorchrun --y 2; true extra\ntorchrun --z &\nwait",
    "a list of layers": "torchrun --moe-layer-freq '([0]*3+[1]*58)' --x 1",
    "a list of layers in a string": 'A="--moe-layer-freq ([0]*3+[1]*58) --layout Et|(tt|)*2L --x 1"; torchrun $A',
    "defaults of variables": "N=${N:-4}\nM=\ntorchrun --x ${N} --y ${M:-${N}} --z=$N-$N",
    "a variable of several words": 'S="16 8 1000"\ntorchrun --rampup-batch-size $S --x 1',
    "quotes": 'torchrun --x "a  b" --y \'c d\' --z=\\" --w ""',
    "settings before a command": 'X=1 Y="2" torchrun --x 1',
    "exported": 'export A="--x 1" B=2\nlocal_rank=3\ntorchrun $A --y $B',
    "a test": 'N=4\nif [ "$N" = 4 ]; then\n  A="--x 1"\nfi\ntorchrun $A',
    "a function": 'f() { torchrun --x "$1"; }\ntorchrun --y 2',
    "a command in a string": 'sh() { eval "$2"; }\nsh -c "torchrun pretrain_gpt.py --x 1 --y \\"a b\\""',
    "a command in two strings": 'sh() { eval "$2"; }\nsh -c \'torchrun pretrain_gpt.py \'"--x 1 --y 2"',
    "a value in two strings": "torchrun pretrain_gpt.py --x 'a --b'\" c\" --y 1",
    "quotes of two kinds": "A='--x 1'\" --y 2\"\ntorchrun pretrain_gpt.py $A",
    "a value below 0": "torchrun --x -1 --y -1e-3",
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_equal_those_that_bash_passes(case: str) -> None:
    if case == "a function":  # its argument is unknown
        arguments, mistakes = script(Source("s.sh", CASES[case]), {})
        assert (
            isinstance(arguments["x"][0].value, ComputedValue) and arguments["y"][0].value == 2 and len(mistakes) == 1
        )
    elif case in ("a log", "commands behind"):  # with an argument that occurs twice
        arguments, _ = script(Source("s.sh", CASES[case]), {})
        assert {name: values[0].value for name, values in arguments.items()} == run(CASES[case])
    else:
        assert read(CASES[case]) == run(CASES[case])


WORD = st.one_of(
    st.integers(-9, 10**6).map(str),
    st.text("abc.=/:,_[]*|;& '\"", min_size=1, max_size=8).filter(lambda text: text.strip(" ;|&") == text),
)
ARGUMENTS = st.dictionaries(
    st.from_regex(r"[a-z]{1,3}(-[a-z]{1,3})?", fullmatch=True), st.lists(WORD, max_size=2), min_size=1, max_size=6
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.data(), ARGUMENTS)
def test_any_words_equal_those_of_bash(data: st.DataObject, arguments: dict[str, list[str]]) -> None:
    """Quoted by shlex, in a command or an array, on one line or several."""
    lines = [" ".join([f"--{name}", *map(shlex.quote, values)]) for name, values in arguments.items()]
    between = data.draw(st.sampled_from([" ", " \\\n  "]))
    if data.draw(st.booleans()):
        text = f'A=({data.draw(st.sampled_from([" ", chr(10)])).join(lines)})\ntorchrun pretrain.py "${{A[@]}}"'
    else:
        text = f"torchrun pretrain.py {between.join(lines)}"
    read_arguments, mistakes = script(Source("s.sh", text), {})
    assert not mistakes
    assert {name: values[0].value for name, values in read_arguments.items()} == run(text)


def test_exponentially_expanding_variables_are_bounded() -> None:
    text = "A=0123456789\n" + "A=$A$A\n" * 60 + f"B={'$A' * 1000}\ntorchrun pretrain_gpt.py --x $A$B --y 1\n"
    arguments, _ = script(Source("s.sh", text), {})
    assert len(str(arguments["x"][0].value)) <= 200_000 and arguments["y"][0].value == 1


def test_invalid_scripts_are_refused() -> None:
    with pytest.raises(SpecError, match="not a shell script: No closing quotation"):
        script(Source("s.sh", "torchrun --x 'a"), {})
    with pytest.raises(SpecError, match="its variables are too long"):
        script(Source("s.sh", f"A={'9' * 90_000}\ntorchrun {'$A ' * 200}"), {})


def test_unknown_values_are_reported() -> None:
    text = 'N=$(nproc)\nA="--x $N --y `date`"\ntorchrun pretrain_gpt.py $A --z $((N * 2)) $EXTRA "$@" --w ${U}\n'
    arguments, mistakes = script(Source("s.sh", text), {})
    assert {name for name, values in arguments.items() if isinstance(values[0].value, ComputedValue)} == {
        "x",
        "y",
        "z",
        "w",
    }
    assert [(item.severity, item.code) for item in mistakes] == [("warning", "I0104")] * 4
    hints = [item.hint for item in mistakes]
    assert hints[0] == "set it: -D N=VALUE" and hints[1] == "write its value" and hints[3] == "set it: -D U=VALUE"
    text = "torchrun pretrain_gpt.py $EXTRA --x 1 \n"
    arguments, mistakes = script(Source("s.sh", text), {})
    assert "$EXTRA" in mistakes[0].message and mistakes[0].hint == "set it: -D EXTRA='--name value'"
    assert read(text, EXTRA="--y 2 --z") == {"x": 1, "y": 2, "z": True}


def test_given_variables_override_those_of_the_script() -> None:
    text = 'A="--x 1"\nB=(--y 2)\nN=3\ntorchrun pretrain_gpt.py $A ${B[@]} --z $N'
    assert read(text) == {"x": 1, "y": 2, "z": 3}
    assert read(text, A="--x 5 --w 6", N="7") == {"x": 5, "w": 6, "y": 2, "z": 7}


def test_branches_are_not_followed() -> None:
    text = "if true; then\n  N=1\nelse\n  N=2\nfi\ntorchrun --x $N"
    arguments, mistakes = script(Source("s.sh", text), {})
    assert arguments["x"][0].value == 2
    assert "`N` is 2 from here on, and was 1" in mistakes[0].message and mistakes[0].span is not None
    assert mistakes[0].span.line == 4
    assert read(text, N="1") == {"x": 1}


def test_spans_point_to_the_words() -> None:
    text = "A=\"--x-y 1\n  --z='a b'\"\ntorchrun $A --w 2 3\ntorchrun --w 4\n"
    arguments, _ = script(Source("s.sh", text), {})
    places = [(value.span.text, value.span.line) for values in arguments.values() for value in values]
    assert places == [("--x-y", 1), ("--z", 2), ("--w", 3), ("--w", 4)]
    arguments, _ = script(Source("s.sh", "bash -c 'torchrun t.py --x 12; sleep 1'\n"), {})
    assert arguments["x"][0].value == 12, "a `;` is not of the word before it"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A+=(2)", 2),
        ("A=(1)\nA+=(2 3)", "1 2 3"),
        ("N=1\nA=($N 2)", "1 2"),
    ],
)
def test_arrays_of_values(text: str, value: object) -> None:
    assert read(f"{text}\ntorchrun t.py --x $A") == {"x": value}
    assert read(f"{text}\ntorchrun t.py --x $A", A="9") == {"x": 9}
