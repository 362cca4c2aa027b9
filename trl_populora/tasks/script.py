"""Options of TRL's GRPO script for `populora train`: the dataset of prompts, and the reward functions.

    PromptArguments --read_prompts---------> train_dataset, eval_dataset
                    --find_reward_functions-> reward_funcs

TRL's own classes declare these options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import trl.rewards
from datasets import Dataset
from trl import DatasetMixtureConfig, get_dataset
from trl.scripts.grpo import GRPOScriptArguments

from trl_populora.options import find_own
from trl_populora.tasks.dataset import read_splits
from trl_populora.tasks.prompts import has_prompts


logger = logging.getLogger(__name__)

# The reward functions that TRL's script knows by name. The last name is a function that makes a reward function.
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
OVERLONG = {"max_completion_len": 1280, "soft_punish_cache": 256}  # what TRL's script gives to the last one


@dataclass
class PromptArguments(GRPOScriptArguments, DatasetMixtureConfig):
    """
    The options of TRL's GRPO script for its dataset and its rewards.

    Raises:
        `ValueError`: If a dataset shall be streamed, or an entry of `datasets` cannot be read.
    """

    _argument_group_name = "A dataset of prompts, as in TRL's script"

    def __post_init__(self) -> None:
        try:
            super().__post_init__()  # makes objects of the entries of `datasets`
        except TypeError as error:
            raise ValueError(f"`datasets` has an entry that cannot be read: {error}.") from error
        for name in ("dataset_streaming", "streaming"):
            if getattr(self, name):
                raise ValueError(
                    f"`{name}=True` is not supported: rows are dealt to members by number, and a stream has none. "
                    "Leave it out."
                )

    @property
    def dataset_names(self) -> list[str]:
        """Names of the datasets to read, maybe none. `datasets` counts before `dataset_name`, as in TRL's script."""
        if self.datasets:
            return [each.path for each in self.datasets]
        return [self.dataset_name] if self.dataset_name else []


def read_prompts(asked: PromptArguments, evaluates: bool) -> tuple[Dataset, Dataset | None]:
    """
    Reads the dataset of prompts that the options name.

    Args:
        asked: The options. `dataset_name` may be a file or a directory, too.
        evaluates: Whether the run evaluates. If not, the split for evaluation is not needed.

    Raises:
        `ValueError`: If `dataset_name` cannot be read, or if the dataset lacks a split that the options name, or holds
            no prompts. TRL reads what `datasets` lists, with the errors of `load_dataset`.
    """
    if asked.datasets and asked.dataset_name:
        logger.warning("`datasets` and `dataset_name` are both given: `datasets` is taken.")
    if asked.datasets:
        splits = get_dataset(asked)
    else:
        splits = read_splits(asked.dataset_name, f"The prompts {asked.dataset_name!r}", asked.dataset_config)
    wanted = {"dataset_train_split": asked.dataset_train_split, "dataset_test_split": asked.dataset_test_split}
    if not evaluates:
        del wanted["dataset_test_split"]
    for option, split in wanted.items():
        if split not in splits:
            raise ValueError(
                f"`{option}={split}`: the dataset has the splits {', '.join(splits)}. Name one of them, give a "
                "directory with a file for each split, or set `eval_strategy` to no."
            )
    train, *rest = (splits[split] for split in wanted.values())
    if not has_prompts(train):
        raise ValueError(
            f"The dataset has the columns {', '.join(train.column_names)}: it holds tasks of the game. Give it as "
            "`seed_tasks`."
        )
    return train, rest[0] if rest else None


def find_reward_functions(asked: PromptArguments) -> list[str | Callable]:
    """
    Finds the reward functions that the options name, in the order of TRL's script: the reward model comes first.

    Raises:
        `ValueError`: If a name is none of TRL's, and no function of the user's own.
    """
    model = [asked.reward_model_name_or_path] if asked.reward_model_name_or_path else []
    # Where the user names one function without a list, YAML gives one text.
    names = [asked.reward_funcs] if isinstance(asked.reward_funcs, str) else asked.reward_funcs or ()
    return [*model, *map(_find_reward, names)]


def _find_reward(name: str) -> Callable:
    if name in TRL_REWARDS:
        found = getattr(trl.rewards, name)
        return found(**OVERLONG) if found is trl.rewards.get_soft_overlong_punishment else found
    choices = f"one of {', '.join(TRL_REWARDS)}, or `module:function` or `module.function` for a function of your own"
    path = name if ":" in name else ":".join(name.rsplit(".", 1))
    found = find_own(path, "`reward_funcs`", choices)
    if not callable(found):
        raise ValueError(f"`reward_funcs` names {name!r}, which is no function but {found!r:.80}.")
    return found


def refuse_both(asked: PromptArguments, tasks: dict[str, Any]) -> None:
    """
    Refuses a dataset of prompts beside the game's tasks.

    Args:
        asked: The options.
        tasks: The options that name tasks, with their values.

    Raises:
        `ValueError`: If both are given.
    """
    given: Sequence[str] = [f"`{name}={value}`" for name, value in tasks.items() if value not in (None, "none")]
    if asked.dataset_names and given:
        raise ValueError(
            f"{' and '.join(given)}: these tasks are for the game, and prompts are given, too. Leave one out."
        )
