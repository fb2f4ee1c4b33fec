"""docs/fine-tuning.md, typed in by a machine: from a folder of Hugging Face to a chat model that `transformers` loads.

The step that reads the adapters with `peft` is done where it is installed.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from compiler.cli.main import main
from tests.typed import ROOT, environment, steps, type_in

PAGE = (ROOT / "docs" / "fine-tuning.md").read_text("utf-8")
# A message of the table, and the command that gives it in the folder of the page.
CHECK, SHOW = ("check", "chat.dsc", "-s"), ("data", "show", "chat.dsc", "-s")
MESSAGES = {
    "the chat template does not mark what the assistant says": (*SHOW, "data.chat.template=none"),
    'expected "messages", or "prompt" and "completion"': (*SHOW, 'data.source="sharegpt.jsonl"'),
    "the chat template fails: 'dict object' has no attribute 'content'": (*SHOW, 'data.source="without.jsonl"'),
    "45 of 45 train rows are longer than 10 tokens, and left out": (*SHOW, "train.sequence=10"),
    "adapters are on `q` and `kv_up`, which no layer of model qwen3_tiny has": (*CHECK, "adapter.on=[q,kv_up,out]"),
    "conversations need the tokenizer of the model that is tuned": (*CHECK, "data.tokenizer=train(300)"),
}
OF_OTHER_TESTS = {
    "holds adapters for other weights": "tests/compiler/tools/weights/test_adapters.py",
    "has adapters, and their base checkpoint cannot be used": "tests/compiler/tools/weights/test_adapters.py",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Home of a reader who did every step of the page."""
    home = tmp_path_factory.mktemp("home")
    has_peft = find_spec("peft") is not None
    runnable = [step for step in steps(PAGE) if has_peft or step.command != "python ask_peft.py"]
    type_in(runnable, home, environment(home, HF_HUB_OFFLINE="1"))
    return home


def test_the_model_learns(home: Path) -> None:
    rows = [json.loads(line) for line in (home / "runs" / "chat" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == 100 and rows[-1]["loss"] < 2 < 5 < rows[0]["loss"]
    assert rows[-1]["validation_loss"] < 2
    assert f"Here this is {100 * 8 / 45:.0f} times the data" in PAGE  # of 50 conversations 5 are held out


def test_all_weights_have_a_plan_too(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    assert main(["plan", "chat.dsc", "-s", "adapter=none"]) == 0
    assert "123.5K parameters\n" in capsys.readouterr().out


def test_messages_match_the_table(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    Path("sharegpt.jsonl").write_text('{"conversations": [{"from": "human", "value": "Hi"}]}\n', "utf-8")
    rows = [json.dumps({"messages": [{"role": "user", "number": number}]}) for number in range(9)]
    Path("without.jsonl").write_text("\n".join(rows), "utf-8")
    documented = {cell.strip("` ") for cell in re.findall(r"^\| (`+ ?.*?`+) \| ", PAGE, re.MULTILINE)}
    assert documented == {*MESSAGES, *OF_OTHER_TESTS}
    for message, command in MESSAGES.items():
        main(list(command))
        captured = capsys.readouterr()
        assert message in captured.out + captured.err, command
    for message, file in OF_OTHER_TESTS.items():
        assert message in (ROOT / file).read_text("utf-8")
