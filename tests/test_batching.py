"""Micro-batches: the same rows, in equal contiguous segments, bounded by tokens, with less padding."""

from __future__ import annotations

import random

import pytest
import torch

from trl_populora.lora.layers import Route
from trl_populora.step import microbatch
from trl_populora.step.microbatch import (
    Batch,
    Sharing,
    add_blank_rows,
    compute_by_micro_batch,
    cut,
    list_layouts,
    match_ranks,
    plan_micro_batches,
    read_layout,
    take_turns,
)


def make_rows(members: list[int], seed: int = 0) -> Batch:
    rng = random.Random(seed)
    rows = len(members)
    prompts = torch.tensor([rng.randint(1, 12) for _ in members])
    completions = torch.tensor([rng.randint(1, 20) for _ in members])
    columns = torch.arange(12) >= 12 - prompts[:, None]
    return {
        "prompt_ids": torch.arange(rows)[:, None].repeat(1, 12) * columns,
        "prompt_mask": columns.long(),
        "completion_ids": torch.arange(rows)[:, None].repeat(1, 20),
        "completion_mask": (torch.arange(20) < completions[:, None]).long(),
        "old_per_token_logps": torch.arange(rows)[:, None].repeat(1, 20).float(),
        "importance_sampling_ratio": torch.arange(rows)[:, None].float(),
        "advantages": torch.arange(rows).float(),
        "member": torch.tensor(members),
        "prompt": torch.arange(rows),
        "num_items_in_batch": torch.tensor(99),
    }


def deal(whole: Batch, size: int, live: set[int] | None = None, multiple: int = 1, **options) -> list[Batch]:
    """The micro-batches of two teachers' and two students' rows, those of `live` if it is given."""
    rows = range(len(whole["member"]))
    asked, answered = (
        [int(whole[mask][row].sum()) * (live is None or row in live) for row in rows]
        for mask in ("prompt_mask", "completion_mask")
    )
    members, prompts = whole["member"].tolist(), whole["prompt"].tolist()
    return cut(whole, plan_micro_batches(members, prompts, asked, answered, 2, size, **options), multiple)


def shuffled(counts: dict[int, int], seed: int = 0) -> list[int]:
    members = [member for member, count in counts.items() for _ in range(count)]
    random.Random(seed).shuffle(members)
    return members


def live(batches: list[dict]) -> list[dict]:
    """Micro-batches that have any row to compute."""
    return [batch for batch in batches if read_layout(batch).used]


@pytest.mark.parametrize(("counts", "size"), [({0: 8, 1: 8, 2: 32, 3: 32}, 16), ({0: 4, 1: 4, 2: 8, 3: 8}, 8)])
def test_segments_are_equal_and_roles_apart_when_the_numbers_allow(counts, size):
    for batch in live(deal(make_rows(shuffled(counts)), size)):
        route = Route(batch["member"].tolist())
        assert route.ordered
        assert route.equal
        assert len({member < 2 for member in route.present}) == 1


@pytest.mark.parametrize("counts", [{0: 3, 1: 5, 2: 7, 3: 9}, {0: 12, 1: 12}, {1: 24}, {0: 1, 3: 23}])
def test_every_row_is_kept_exactly_once(counts):
    dealt = deal(make_rows(shuffled(counts)), 8)
    assert len(dealt) == 3
    assert sorted(torch.cat([b["advantages"] for b in live(dealt)]).tolist()) == list(range(24))
    for batch in dealt:
        for key in ("completion_ids", "old_per_token_logps", "importance_sampling_ratio"):
            assert (batch[key][:, 0] == batch["advantages"]).all(), f"{key} lost its row"
        assert batch["num_items_in_batch"] == 99


def test_trimming_removes_padding_and_no_token():
    whole = make_rows(shuffled({0: 8, 1: 8, 2: 32, 3: 32}))
    dealt = live(deal(whole, 16))
    for mask in ("prompt_mask", "completion_mask"):
        assert sum(int(b[mask].sum()) for b in dealt) == int(whole[mask].sum())
        assert all(b[mask].any(0).all() for b in dealt), "a column of pure padding is left"
    _, untrimmed = match_ranks([whole | {"pack": torch.arange(80)}], 80)
    _, shares = match_ranks(deal(whole, 16), 80)
    assert 0 < shares["batch/padding"] < untrimmed["batch/padding"] < 1
    assert (shares["batch/live_rows"], shares["batch/shared_tokens"]) == (1, 0), "no prompt is shared here"


def test_members_take_turns_longest_rows_first():
    members, lengths = [2, 2, 3, 3], [5, 9, 9, 5]
    assert take_turns(members, lengths, None) == [[1, 2], [0, 3]]
    assert take_turns(members, lengths, [7, 7, 8, 9]) == [[1, 0], [2], [3]]


def test_a_row_without_prompt_padding_is_left_whole():
    whole = make_rows([0, 0])
    whole["prompt_mask"][:] = 1
    assert deal(whole, 2)[0]["prompt_ids"].shape[1] == 12


def test_widths_stay_multiples_where_they_are_wanted():
    whole = make_rows(shuffled({0: 4, 1: 4, 2: 8, 3: 8}))  # 12 prompt and 20 completion columns
    dealt = deal(whole, 8, multiple=4)
    for batch, tight in zip(dealt, deal(whole, 8), strict=True):
        for column in ("prompt_ids", "completion_ids"):
            used = tight[column].shape[1]
            assert batch[column].shape[1] == -(-used // 4) * 4
        assert batch["prompt_mask"].sum() == tight["prompt_mask"].sum()
        assert batch["completion_mask"].sum() == tight["completion_mask"].sum()
    assert any(batch["completion_ids"].shape[1] < 20 for batch in live(dealt))


def test_blank_rows_are_in_no_forward():
    members = shuffled({0: 8, 1: 8, 2: 32, 3: 32})
    rows = set(random.Random(3).sample(range(80), 21))
    dealt = deal(make_rows(members), 16, live=rows)
    assert sorted(torch.cat([batch["completion_ids"][:, 0] for batch in live(dealt)]).tolist()) == sorted(rows)
    assert sum(int((batch["pack"] >= 0).sum()) for batch in dealt) == 21
    assert len(dealt) == 5
    for batch in dealt[2:]:  # a few tokens, for the forward in which all processes meet
        assert (batch["prompt_mask"].shape, batch["completion_mask"].shape) == ((1, 1), (1, 2))
        assert read_layout(batch).heads == [0]
    for batch in dealt[:2]:
        assert Route(batch["member"][read_layout(batch).heads].tolist()).ordered


@pytest.mark.parametrize(("together", "forwards"), [(False, 2), (True, 5)])
def test_blank_micro_batches_have_a_forward_where_ranks_meet_in_it(together, forwards):
    whole = make_rows(shuffled({0: 8, 1: 8, 2: 32, 3: 32}))
    rows = set(random.Random(3).sample(range(80), 21))
    computed = []

    def forward(batch: Batch) -> torch.Tensor:
        computed.append(batch)
        return batch["completion_ids"].float()

    batches = [batch | {"row": batch["prompt"]} for batch in deal(whole, 16, live=rows)]
    found = compute_by_micro_batch(forward, batches, 80, 20, together)
    assert len(computed) == forwards
    assert {row for row in range(80) if not found[row].isnan().any()} == rows


@pytest.mark.parametrize("sharing", [None, Sharing(False, 0.0), Sharing(False, 0.01)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_micro_batch_holds_as_many_tokens_as_the_usual_number_of_the_longest_rows(sharing, size):
    whole = make_rows(shuffled({0: 4, 1: 4, 2: 20, 3: 20}, seed=size), seed=size)
    # Eight rows to a prompt, of a length that goes with it.
    whole["prompt"] = whole["member"] * 10 + whole["completion_ids"][:, 0] // 8
    whole["prompt_mask"] = (torch.arange(12) >= whole["prompt"][:, None] % 12).long()
    most = size * sum(int(whole[mask].sum(1).max()) for mask in ("prompt_mask", "completion_mask"))
    dealt = deal(whole, size, sharing=sharing)
    assert len(dealt) == 48 // size
    assert max(read_layout(batch).grid for batch in dealt) <= most
    assert sum(int((batch["pack"] >= 0).sum()) for batch in dealt) == 48
    fewest = sum(read_layout(batch).grid for batch in dealt) / most
    assert len(live(dealt)) < 2 * fewest + 1, "micro-batches are filled"


def test_a_plan_lays_out_a_row_a_few_times(monkeypatch):
    # A group that fits is tried whole. Tried row by row, a row was laid out 89 times here.
    rng = random.Random(0)
    prompts = [task for task in range(40) for _ in range(8)]
    asked = [rng.randint(100, 250) for _ in range(40)]
    lengths = [asked[task] for task in prompts]
    answered = [rng.randint(20, 150) for _ in prompts]
    laid_out = []

    def note(rows, *others):
        laid_out.extend(rows)
        return list_layouts(rows, *others)

    monkeypatch.setattr(microbatch, "list_layouts", note)
    members = [task % 4 for task in prompts]
    plan = plan_micro_batches(members, prompts, lengths, answered, 2, 32, Sharing(False, 0.0))
    assert sorted(row for packs in plan for pack in packs for row in pack) == [*range(320)]
    assert len(laid_out) < 40 * len(prompts)


def test_added_rows_are_blank_and_change_no_layout():
    batch = deal(make_rows([0, 0, 2]), 3)[0]
    more = add_blank_rows(batch, 5)
    assert len(more["member"]) == len(more["pack"]) == 5
    assert read_layout(more).packs == read_layout(batch).packs
    assert not more["completion_mask"][3:].any()
    assert not more["old_per_token_logps"][3:].any(), "a blank row has the ratio of an unchanged policy"
    assert torch.equal(more["old_per_token_logps"][:3], batch["old_per_token_logps"])
    assert add_blank_rows(batch, 3)["pack"].tolist() == batch["pack"].tolist()
