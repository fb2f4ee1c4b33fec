"""Prompts that a run draws: prepared once, each drawn once an epoch, with completions beside their prompts' rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from runtime.contract import DataRecipe, DataRequest, PromptsRecipe, RewardRecipe
from runtime.data.files import DataError
from runtime.data.order import Order
from runtime.data.position import Position
from runtime.data.prepare import PreparedFolder, prepare
from runtime.data.prompts import PromptReader, PromptSamples, open_prompts
from runtime.data.rewards.scoring import Rewards
from runtime.data.shards import UNSTARTED
from runtime.run.starting_position import resume_position
from tests.runtime.data.chats import CHATML, PLAIN, TOKENS, said, write_model, write_rows

NUM = 23
ROWS: list[dict[str, Any]] = [
    {"prompt": f"{number} and {number}?" + " more" * (10 * (number % 5 == 3)), "answer": 2 * number, "at": number}
    if number % 2
    else {"prompt": [said("user", f"{number} + {number}?")], "solution": f"#### {2 * number}", "at": number}
    for number in range(NUM)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", CHATML)
    write_rows(tmp_path / "rows" / "a.jsonl", ROWS[:9])
    write_rows(tmp_path / "rows" / "b.jsonl", ROWS[9:])
    return tmp_path


@dataclass
class Preparing:
    folder: Path

    def __call__(self, out: str = "data", *, seed: int = 7, vocab: int = 400, **more: Any) -> PreparedFolder:
        cache = self.folder / "cache" if more.pop("cache", False) else None
        resumed, phases = more.pop("resumed", ()), more.pop("phases", [])
        fields = {
            "source": "rows/*",
            "tokenizer": "model/tokenizer.json",
            "validation": 0.0,
            "prompts": PromptsRecipe(),
        }
        request = DataRequest(DataRecipe(**(fields | more)), vocab, seed)
        target = self.folder / "runs" / out
        return prepare(request, self.folder, target, lambda name, *_: phases.append(name), cache=cache, resumed=resumed)


@pytest.fixture
def prepared(folder: Path) -> Preparing:
    return Preparing(folder)


def samples(found: PreparedFolder, longest: int = 40, group: int = 4, seed: int = 3) -> PromptSamples:
    return PromptSamples(found.folder, longest, group, seed, found.meta["tokenizer"]["end_of_document"])


def plan(longest: int = 40, check: str = "exact", prompts: PromptsRecipe | None = None) -> Any:
    """The fields of a plan that are read here."""
    grpo = SimpleNamespace(prompt=longest, group=4, rewards=(SimpleNamespace(check=check),))
    return SimpleNamespace(
        train=SimpleNamespace(grpo=grpo, seed=3), data=SimpleNamespace(prompts=prompts or PromptsRecipe())
    )


def at(drawn: PromptSamples, index: int) -> int:
    """The index in ROWS of a drawn prompt."""
    row: int = drawn.case(index, np.zeros(0, np.int64)).columns["at"]
    return row


# ---------------------------------------------------------------- order


def test_an_epoch_draws_each_prompt_once_in_an_order_of_its_own(prepared: Preparing) -> None:
    drawn = samples(prepared(), longest=1000)
    epochs = [[at(drawn, index) for index in range(epoch * NUM, (epoch + 1) * NUM)] for epoch in range(4)]
    assert all(sorted(epoch) == [*range(NUM)] for epoch in epochs)
    assert len({*map(tuple, epochs)}) == 4 and sorted(epochs[0]) not in epochs
    reseeded = samples(prepared(), longest=1000, seed=4)
    assert [at(reseeded, index) for index in range(NUM)] not in epochs
    again = samples(prepared(), longest=1000, group=2)
    assert [at(again, index) for index in range(NUM)] == epochs[0], "the group does not matter"
    assert drawn.epochs(0) == 0 and drawn.epochs(NUM * 4) == 1 and drawn.epochs(NUM * 6) == 1.5
    assert drawn.order == Order(4, NUM * 4, 3)


def test_long_prompts_are_left_out_and_counted(prepared: Preparing) -> None:
    drawn = samples(prepared())
    sizes = {row: len(drawn.survey.reader.ids(row)) for row in range(NUM)}
    long = {row for row, size in sizes.items() if size > 40}
    assert long == {3, 13}, "as the rows are written"
    assert sorted(at(drawn, index) for index in range(NUM - 2)) == sorted({*range(NUM)} - long)
    assert max(len(drawn.prompt(index)) for index in range(100)) == max(s for s in sizes.values() if s <= 40)
    facts = {"rows": NUM, "samples": NUM - 2, "dropped": 2, "padding": 0, "cut": 0, "without_loss": 0}
    assert drawn.survey.facts == facts
    longest = max(sizes.values())
    assert drawn.survey.notes() == [
        f"2 of 23 prompts have more than `prompt = 40` tokens, and are left out; the longest has {longest}",
        f"in 12 rows {UNSTARTED}",  # of messages: the template writes no start token
    ]
    everything = samples(prepared(), longest=longest)
    assert everything.survey.notes() == [f"in 12 rows {UNSTARTED}"] and everything.survey.facts["samples"] == NUM
    with pytest.raises(DataError, match=r"no prompt is left: 23 of 23 prompts have more than `prompt = 3` tokens"):
        samples(prepared(), longest=3)


# ---------------------------------------------------------------- prompts and completions


@pytest.mark.parametrize("template", [CHATML, PLAIN])
def test_prompts_and_completions_equal_transformers(folder: Path, template: str, prepared: Preparing) -> None:
    path = write_model(folder / "model", template)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=template, **TOKENS)
    drawn = samples(prepared(template[:5]))
    assert drawn.end == theirs.eos_token_id != theirs.convert_tokens_to_ids("<|endoftext|>")
    random = np.random.default_rng(1)
    for index in range(60):
        row = ROWS[at(drawn, index)]
        if isinstance(row["prompt"], str):
            ids, prompt = theirs(text=row["prompt"])["input_ids"], row["prompt"]
        else:
            ids = theirs.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            prompt = theirs.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        assert drawn.prompt(index).tolist() == ids and drawn.prompt(index).dtype == np.int64
        completion = random.integers(0, len(theirs), 30)
        ended = np.append(completion[completion != drawn.end], [drawn.end, 5, 6])
        for tokens, expected in ((ended, ended[:-3]), (ended[:-3], ended[:-3]), (ended[:-2], ended[:-3])):
            case = drawn.case(index, tokens)
            assert case.prompt == prompt
            assert case.completion == theirs.decode(expected, skip_special_tokens=True)
            assert case.messages == (None if isinstance(row["prompt"], str) else row["prompt"])
            columns = {name: value for name, value in row.items() if name != "prompt"}
            assert case.columns == {"answer": row.get("solution"), **columns}


def test_a_token_unknown_to_the_tokenizer_has_no_text(prepared: Preparing) -> None:
    """A model may have more token ids than its tokenizer."""
    drawn = samples(prepared())
    ids = drawn.prompt(next(index for index in range(NUM) if at(drawn, index) == 5))
    assert drawn.case(0, np.array([399, *ids, 398])).completion == "5 and 5?", "nor is the special token before it"
    assert drawn.case(0, np.array([drawn.end])).completion == ""


def test_rewards_score_the_drawn_prompts(folder: Path, prepared: Preparing) -> None:
    drawn, bpe = samples(prepared(), longest=1000), Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    answers = [2 * at(drawn, index) + (index % 3 == 0) for index in range(NUM)]
    completions = [bpe.encode(f"so \\boxed{{{number}}}", add_special_tokens=False).ids for number in answers]
    with Rewards((RewardRecipe("right", "exact", 1.0),), {}) as rewards:
        scores = rewards.score([drawn.case(i, np.array([*ids, drawn.end])) for i, ids in enumerate(completions)])
    assert scores[:, 0].tolist() == [float(index % 3 != 0) for index in range(NUM)]


# ---------------------------------------------------------------- the folder


def test_the_folder_contains_the_files_that_a_run_reads(prepared: Preparing) -> None:
    data = prepared()
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "meta.json"}
    names |= {f"{side}.{end}" for side in ("train", "validation") for end in ("bin", "idx", "rows")}
    assert {path.name for path in data.folder.iterdir()} == names
    assert data.meta["splits"]["train"]["documents"] == NUM and data.meta["unigram_nats"] is None
    assert data.meta["prompts"]["unanswered"]["train"] == {"rows": 0, "first": -1}


def test_everything_that_affects_prompts_affects_the_key(folder: Path, prepared: Preparing) -> None:
    first = prepared("a")
    keys = {first.folder.name}
    assert prepared("b", seed=8).folder.name in keys, "the order is the run's"
    keys.add(prepared("c", prompts=PromptsRecipe(answer="at")).folder.name)
    (folder / "model" / "chat_template.jinja").write_text(PLAIN, "utf-8")
    keys.add(prepared("d").folder.name)
    write_rows(folder / "rows" / "b.jsonl", ROWS[9:-1])
    keys.add(prepared("e").folder.name)
    assert len(keys) == 4
    assert prepared("e").meta["sha256"] != first.meta["sha256"], "by which a checkpoint knows other prompts"


def test_prompts_are_encoded_once_and_divided_anew(prepared: Preparing) -> None:
    first = prepared("a", cache=True)
    again = prepared("b", cache=True)
    assert again.reused and again.meta["sha256"] == first.meta["sha256"]
    phases: list[str] = []
    divided = prepared("c", cache=True, validation=0.3, phases=phases)
    alone = prepared("d", validation=0.3)
    assert "divide" in phases and "encode" not in phases and divided.meta["sha256"] == alone.meta["sha256"]
    sides = [PromptReader(divided.folder / side) for side in ("train", "validation")]
    rows = [side.row(index)["columns"]["at"] for side in sides for index in range(side.num_prompts)]
    assert sorted(rows) == [*range(NUM)] and min(side.num_prompts for side in sides) > 0
    reader = PromptReader(first.folder / "train")
    ids = {reader.row(index)["columns"]["at"]: reader.ids(index).tolist() for index in range(NUM)}
    for side in sides:
        for index in range(side.num_prompts):
            assert side.ids(index).tolist() == ids[side.row(index)["columns"]["at"]]


def test_a_resumed_run_does_not_open_its_rows(folder: Path, prepared: Preparing) -> None:
    first = prepared()
    (folder / "rows").rename(folder / "gone")
    (folder / "model").rename(folder / "no model")
    data = prepared(resumed=[first.meta["sha256"]])
    assert data.reused and data.folder == first.folder
    assert len(samples(data).prompt(0))
    with pytest.raises(DataError):
        prepared(resumed=[first.meta["sha256"]], prompts=PromptsRecipe("question"))


def test_prompts_that_cannot_be_prepared_are_named(folder: Path, prepared: Preparing) -> None:
    (folder / "rows" / "b.jsonl").write_text('{"prompt": "x"}\n{"question": "x"}\n', "utf-8")
    with pytest.raises(DataError, match=r'rows/b\.jsonl:2: no "prompt"; there are question: write'):
        prepared()
    (folder / "rows" / "b.jsonl").write_text('{"prompt": "\\ud800"}\n', "utf-8")
    with pytest.raises(DataError, match=r"rows/b\.jsonl:1: the text holds half of a surrogate pair"):
        prepared()
    for path in (folder / "rows").iterdir():
        path.write_text("\n", "utf-8")
    with pytest.raises(DataError, match=r"rows/a\.jsonl: no prompts: a prompt is a line of \.jsonl, or a row"):
        prepared()
    (folder / "model" / "chat_template.jinja").unlink()
    write_rows(folder / "rows" / "a.jsonl", ROWS[1:3])
    with pytest.raises(DataError, match=r"a\.jsonl:2: there is no chat template: put chat_template\.jinja beside"):
        prepared()
    (folder / "model" / "chat_template.jinja").write_text("{{ raise_exception('no ' + messages[0].role) }}")
    with pytest.raises(DataError, match=r"a\.jsonl:2: the chat template fails: no user"):
        prepared()
    (folder / "model" / "chat_template.jinja").write_text("")
    with pytest.raises(DataError, match=r"a\.jsonl:2: the prompt has no tokens"):
        prepared()


def test_damage_is_an_error_of_the_damaged_file(prepared: Preparing) -> None:
    data = prepared()
    path = data.folder / "train.rows"
    path.write_bytes(path.read_bytes() + b"{}\n")
    with pytest.raises(DataError, match=r"train\.rows: not 23 lines, one for each prompt"):
        samples(data)
    path.unlink()
    with pytest.raises(DataError, match=r"train\.rows: no such file of a shard"):
        samples(data)
    assert len(samples(prepared()).prompt(0)), "it is made again"


# ---------------------------------------------------------------- the run


def test_a_run_opens_the_prompts_of_its_plan(folder: Path, prepared: Preparing) -> None:
    data = prepared()
    drawn = open_prompts(plan(), data.folder)
    assert (drawn.group, drawn.end, drawn.order) == (4, samples(data).end, samples(data).order)
    write_rows(folder / "rows" / "a.jsonl", [*ROWS[:3], {"prompt": "x"}, {"prompt": "y", "answer": None}])
    changed = prepared("other")
    with pytest.raises(DataError) as caught:
        open_prompts(plan(), changed.folder)
    assert "2 of 19 prompts have no answer, which `check = exact` compares with" in str(caught.value)
    assert "`dsc data show --row 3` shows the first" in str(caught.value)
    assert PromptReader(changed.folder / "train").row(3)["prompt"] == "x"
    assert open_prompts(plan(check="format"), changed.folder).survey.facts["rows"] == 19


def test_a_folder_of_text_holds_no_prompts(folder: Path, prepared: Preparing) -> None:
    (folder / "rows" / "c.jsonl").write_text(json.dumps({"text": "x " * 100}) + "\n", "utf-8")
    data = prepared(source="rows/c.jsonl", prompts=None)
    with pytest.raises(DataError, match="these are no prompts"):
        open_prompts(plan(), data.folder)


def gone_on(was: Position, order: Order) -> tuple[Position, list[str]]:
    checkpoint: Any = SimpleNamespace(meta={"position": json.loads(json.dumps(was.to_json()))})
    build: Any = SimpleNamespace(plan=plan())
    return resume_position(checkpoint, build, order, same_text=True)


def test_a_run_continues_with_the_next_prompt() -> None:
    order = Order(4, 4 * NUM, 3)
    was = Position(200, 6400, 208, ((240, 248),), order)
    assert gone_on(was, order) == (was, [])


@pytest.mark.parametrize("order", [Order(4, 4 * 10, 3), Order(6, 6 * NUM, 3), Order(4, 4 * NUM, 9), Order(16, 16, 3)])
def test_with_other_prompts_a_run_continues_at_a_whole_group(order: Order) -> None:
    was = Position(200, 6400, 200, ((240, 248),), Order(4, 4 * NUM, 3))
    position, notes = gone_on(was, order)
    assert notes == ["the prompts are others, or their order is: the run goes on at the same share of the epoch"]
    assert (
        (position.samples, position.tokens, position.order) == (200, 6400, order)
        and not position.skip
        and not position.cuts
    )
    assert position.next % order.sequence == 0
    share = 200 / (4 * NUM)
    assert share - order.sequence / order.windows < position.next / order.windows <= share
    assert position.draw(2 * order.sequence).tolist() == [*range(position.next, position.next + 2 * order.sequence)]
