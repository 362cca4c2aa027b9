"""`docs/options.md` decides about every inherited option, and what it says is refused is refused."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig, ModelConfig


PAGE = (Path(__file__).parent.parent / "docs" / "options.md").read_text()
NAME = re.compile(r"`(\w+)`")


def decide(section: str) -> list[tuple[str, str]]:
    """Every option of a section, with what becomes of it: from the table, and from the two lists below it."""
    table, _, lists = section.partition("\n**As in TRL:** ")
    honoured, _, without = lists.partition("\n**Without meaning:**\n")
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|", table, re.MULTILINE)
    decided = [(name, decision) for names, decision in rows for name in NAME.findall(names)]
    reasons = re.findall(r"^\* (.+?): ", without, re.MULTILINE | re.DOTALL)  # names, before what nobody asks for
    decided += [(name, "without meaning") for names in reasons for name in NAME.findall(names)]
    return decided + [(name, "honoured") for name in NAME.findall(honoured)]


ROWS = {section.partition("`")[0]: decide(section) for section in PAGE.split("\n## `")[1:]}


@pytest.mark.parametrize(("section", "config"), [("GRPOConfig", GRPOConfig), ("ModelConfig", ModelConfig)])
def test_every_inherited_option_is_decided_once(section, config):
    """A field that a new TRL or transformers brings fails this until somebody decides what becomes of it."""
    listed = ROWS[section] + (ROWS["TrainingArguments"] if config is GRPOConfig else [])
    assert Counter(name for name, _ in listed) == Counter(option.name for option in fields(config))
    assert {decision for _, decision in listed} <= {"honoured", "refused", "without meaning"}


def test_options_of_trl_and_of_transformers_stand_apart():
    names = {option.name for option in fields(TrainingArguments)}
    assert {name for name, _ in ROWS["TrainingArguments"]} <= names
    assert not {name for name, _ in ROWS["GRPOConfig"]} & (names - {"remove_unused_columns"})


# Another value than the default. What members of a step share follows from the population.
ELSEWHERE = {"parallelism_config"}  # TRL's own refusal, which needs an environment of several devices
OTHER = {
    "router_aux_loss_coef": 0.01,
    "num_generations_eval": 3,
    "generation_batch_size": 12,
    "steps_per_generation": 2,
    "multi_objective_aggregation": "normalize_then_sum",
    "sync_ref_model": True,
    "top_entropy_quantile": 0.5,
    "entropy_coef": 0.1,
    "use_adaptive_entropy": True,
    "off_policy_mask_threshold": 0.5,
    "use_transformers_continuous_batching": True,
    "use_transformers_paged": True,
    "optim_target_modules": "all-linear",
    "gradient_accumulation_steps": 2,
    "auto_find_batch_size": True,
    "ds3_gather_for_generation": False,
    "ddp_static_graph": True,
}


def test_what_the_page_calls_refused_is_tested_below():
    refused = {name for part in ("GRPOConfig", "TrainingArguments") for name, how in ROWS[part] if how == "refused"}
    assert refused == OTHER.keys() | ELSEWHERE


@pytest.mark.parametrize("option", OTHER)
def test_a_refused_option_is_refused_by_name(make_args, option):
    with pytest.raises(ValueError, match=option):
        make_args(**{option: OTHER[option]})
