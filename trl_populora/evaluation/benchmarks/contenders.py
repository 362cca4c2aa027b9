"""Who is evaluated: the members, the base without an adapter, and adapters of other runs beside them."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_populora.assets import resolve_model_path
from trl_populora.hub.downloads import fetch
from trl_populora.hub.model_card import VLLM_RANKS
from trl_populora.population.members import read_population
from trl_populora.runs.saved_population import best_adapter, check_one_moment


BASE = "base"
SUMMARY = ("mean", "best", "worst")  # what the members come to: further columns of the table


@dataclass(frozen=True)
class Contender:
    """
    One column of the table.

    Args:
        name (`str`): Under which the server knows it.
        role (`str`): `"teacher"`, `"student"`, `"base"` or `"compared"`.
        adapter (`Path`, *optional*): Its PEFT directory; the base has none.
    """

    name: str
    role: str
    adapter: Path | None = None

    @property
    def is_member(self) -> bool:
        return self.role in ("teacher", "student")

    def digest(self, base: str) -> str:
        """Tells apart adapters of one name, so that answers of an earlier one are never taken for a later one's."""
        seen = hashlib.sha256(base.encode())
        for path in sorted(self.adapter.glob("adapter_*")) if self.adapter else ():
            seen.update(path.read_bytes())
        return seen.hexdigest()

    def rank(self) -> int:
        """Largest rank of the adapter's modules, 0 for the base."""
        if self.adapter is None:
            return 0
        config = _adapter_config(self.adapter)
        return max(map(int, [config["r"], *(config.get("rank_pattern") or {}).values()]))

    def patterns(self) -> list[str]:
        """The options by which modules have ranks or alphas of their own."""
        config = _adapter_config(self.adapter) if self.adapter else {}
        return [f"`{name}`" for name in ("rank_pattern", "alpha_pattern") if config.get(name)]


def find_contenders(
    run: str, members: list[str] | None, compare: list[str] | None, base: str | None
) -> tuple[str, list[Contender]]:
    """
    The base model's name and all contenders: members, base, compared.

    Raises:
        `ValueError`: If there is no such population, member or adapter, vLLM cannot serve one, or two columns would
            have the same name.
    """
    root = fetch(run)
    saved = read_population(root)
    names = [member["name"] for member in saved["members"]]
    if unknown := [name for name in members or () if name not in names]:
        raise ValueError(f"`members` names {', '.join(unknown)}; {run} has {', '.join(names)}.")
    # By adapter: a single agent is asked once, as the student.
    by_adapter = {
        member["adapter"]: Contender(member["name"], member["role"], root / member["adapter"])
        for member in saved["members"]
        if not members or member["name"] in members
    }
    check_one_moment(root, saved, list(by_adapter))
    found = [*by_adapter.values(), Contender(BASE, "base")]
    for other in compare or ():
        found.append(Contender(Path(other).resolve().name, "compared", _adapter_of(other)))
    for contender in found:
        if (rank := contender.rank()) > VLLM_RANKS[-1]:
            raise ValueError(f"{contender.name} has rank {rank}, vLLM serves up to {VLLM_RANKS[-1]}.")
    counts = Counter([*(each.name for each in found), *SUMMARY])
    if doubles := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"Two columns of the table would be called {', '.join(doubles)}; the name of a compared adapter is the "
            "last part of its path."
        )
    return resolve_model_path(base or saved["base_model"]), found


# What transformers calls a stop, and vLLM.
_STOPS = {"stop": "stop", "stop_strings": "stop", "stop_token_ids": "stop_token_ids", "eos_token_id": "stop_token_ids"}


def find_question_options(run: str) -> dict[str, Any]:
    """What goes along with every question: the chat template's arguments and the stops of the run's own sampling."""
    settings = read_population(fetch(run)).get("settings", {})
    sampling = settings.get("generation_kwargs") or {}
    along = {_STOPS[name]: value for name, value in sampling.items() if name in _STOPS and value is not None}
    if "stop_token_ids" in along and not isinstance(along["stop_token_ids"], list):
        along["stop_token_ids"] = [along["stop_token_ids"]]
    if template := settings.get("chat_template_kwargs"):
        along["chat_template_kwargs"] = template
    return along


def revision_flags(run: str, base: str | None) -> str:
    """What has vLLM load the revision that the run was trained on, unless another base is wanted."""
    revision = read_population(fetch(run)).get("settings", {}).get("base_revision", "main")
    return "" if base or revision == "main" else f"--revision {shlex.quote(revision)}"


def _adapter_of(source: str) -> Path:
    """The best student of a run or of a pushed population, which lies at its root, or an adapter as it is."""
    root = fetch(source, wanted=["population.json", "adapter_*"])
    if not (root / "population.json").exists():
        return root
    if not (root / "adapter_config.json").exists():  # a checkpoint
        return best_adapter(root)
    check_one_moment(root, read_population(root), ["."])
    return root


def _adapter_config(adapter: Path) -> dict:
    path = adapter / "adapter_config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {adapter} holds no PEFT adapter.") from error
