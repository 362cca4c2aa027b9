"""
The evolution phase: who goes, who breeds, and the callback that puts the children in place.

Every `evolve_every` optimizer steps the lowest-rated members of each role give their slots to offspring of the
survivors (PopuLoRA, arXiv 2605.16727). Selection and breeding are pure functions; [`EvolutionCallback`] alone touches
the trainer.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from transformers import TrainerCallback

from trl_populora.options import check_bounds, check_numbers
from trl_populora.population.factors import Factors, compare
from trl_populora.population.members import PRIOR_SIGMA, ROLES, Member, Population
from trl_populora.population.operators import find_operator


# The paper's own eight, evenly. The other operators of the tables are used only where a run names them.
DEFAULT_MUTATIONS = ("svd_perturb", "layer_gaussian", "component_mask", "full_gaussian")
DEFAULT_CROSSOVERS = ("dare", "module_swap", "svd_subspace", "extrapolate")


def read_mixture(
    value: Mapping[str, float] | Sequence[str] | str | None, default: Sequence[str], field: str
) -> dict[str, float]:
    """
    Weights of operators by name, from what a config, a YAML file or a command line may hold.

    Args:
        value: Weights; or names, weighted evenly; or either as text (JSON, or names with commas). `None` is the
            default.
        default: Names to use for `None`.
        field: Name of the config field, `"mutations"` or `"crossovers"`.

    Raises:
        `ValueError`: If a name is unknown, a weight negative, or nothing has weight.
    """
    if isinstance(value, str):
        is_json = value.lstrip().startswith(("{", "["))
        try:
            value = json.loads(value) if is_json else [name.strip() for name in value.split(",")]
        except ValueError as error:
            raise ValueError(f"`{field}` is no JSON: {error}, got {value!r}.") from error
    value = default if value is None else value
    weights = dict(value) if isinstance(value, Mapping) else dict.fromkeys(value, 1.0)
    for name, weight in weights.items():
        find_operator(name, field)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise ValueError(f"`{field}` must have non-negative weights, got {weight} for {name!r}.")
    if not sum(weights.values()) > 0:
        raise ValueError(f"`{field}` gives no operator a weight, got {value!r}. Set the rate to 0 instead.")
    return {name: float(weight) for name, weight in weights.items()}


@dataclass(frozen=True)
class Birth:
    """
    A planned replacement: everything that decides the child except the parents' weights.

    Args:
        name: Name of the member that goes. Its child takes over the name.
        role: Its role.
        parents: One or two surviving members, the fitter first.
        operator: Name of a mutation (one parent) or crossover (two).
        strength: Strength handed to the operator.
        seed: Seed of the operator's generator.
    """

    name: str
    role: str
    parents: tuple[str, ...]
    operator: str
    strength: float
    seed: int


@dataclass(frozen=True)
class Breeding:
    """
    When an event comes, and how it selects and breeds. Each field but `roles` is the option of the same name.

    Args:
        evolve_every: Optimizer steps between two events; 0 is never.
        evolve_burn_in: Matches before a member can be replaced.
        cull_fraction: Share of each role replaced, at least one member.
        crossover_rate: Probability of two parents instead of one.
        tournament_size: Survivors drawn per parent.
        mutations, crossovers: Weights of the operators, see [`read_mixture`].
        mutation_strength: Strength of mutations; crossovers have 1.
        seed: With the step it decides every random choice.
        roles: Those that evolve; both by default.

    Raises:
        `ValueError`: If a value is out of range, or an operator is not there.
    """

    evolve_every: int = 10
    evolve_burn_in: int = 5
    cull_fraction: float = 0.25
    crossover_rate: float = 0.5
    tournament_size: int = 2
    mutations: Mapping[str, float] | str | None = None
    crossovers: Mapping[str, float] | str | None = None
    mutation_strength: float = 1.0
    seed: int = 0
    roles: tuple[str, ...] = ROLES

    def __post_init__(self):
        check_numbers(self)
        bounds = {
            ">= 0": "evolve_every evolve_burn_in cull_fraction crossover_rate mutation_strength",
            ">= 1": "tournament_size",
            "< 1": "cull_fraction",
            "<= 1": "crossover_rate",
        }
        check_bounds(self, bounds)
        read_mixture(self.mutations, DEFAULT_MUTATIONS, "mutations")
        read_mixture(self.crossovers, DEFAULT_CROSSOVERS, "crossovers")


def cull(members: Sequence[Member], fraction: float, burn_in: int) -> list[Member]:
    """
    Members of one role to replace, the least fit first: never the fittest, never one younger than `burn_in` matches.

    Args:
        members: All members of the role.
        fraction: Share of them to replace, rounded down, but at least one; 0 replaces nobody.
        burn_in: Matches before a member can be replaced; until then its rating says little.
    """
    if fraction <= 0:
        return []
    ranked = sorted(members, key=lambda member: (Population.fitness(member), -member.index))
    eligible = [member for member in ranked[:-1] if member.age >= burn_in]
    return eligible[: max(1, int(fraction * len(members)))]


def hold_tournament(candidates: Sequence[Member], size: int, rng: random.Random) -> Member:
    """The fittest of `size` candidates drawn without replacement (all of them if there are fewer)."""
    drawn = rng.sample(list(candidates), min(size, len(candidates)))
    return max(drawn, key=lambda member: (Population.fitness(member), -member.index))


def plan_births(population: Population, breeding: Breeding, rng: random.Random) -> list[Birth]:
    """
    The births of one event, teachers' first. Parents are survivors of the same role, so no birth depends on another.

    Args:
        population: Rated members; not changed.
        breeding: Settings.
        rng: The same on every rank.
    """
    mutations = read_mixture(breeding.mutations, DEFAULT_MUTATIONS, "mutations")
    crossovers = read_mixture(breeding.crossovers, DEFAULT_CROSSOVERS, "crossovers")
    births = []
    for role in breeding.roles:
        members = population.role(role)
        culled = cull(members, breeding.cull_fraction, breeding.evolve_burn_in)
        survivors = [member for member in members if member not in culled]
        for member in culled:
            parents = [hold_tournament(survivors, breeding.tournament_size, rng)]
            table, strength = mutations, breeding.mutation_strength
            if len(survivors) > 1 and rng.random() < breeding.crossover_rate:
                others = [survivor for survivor in survivors if survivor is not parents[0]]
                parents.append(hold_tournament(others, breeding.tournament_size, rng))
                parents.sort(key=Population.fitness, reverse=True)
                table, strength = crossovers, 1.0
            (operator,) = rng.choices(list(table), list(table.values()))
            names = tuple(parent.name for parent in parents)
            births.append(Birth(member.name, role, names, operator, strength, rng.getrandbits(63)))
    return births


def breed(birth: Birth, parents: Sequence[Factors]) -> Factors:
    """The child's factors. The same birth and parents give the same child."""
    operator = find_operator(birth.operator, "mutations" if len(parents) == 1 else "crossovers")
    return operator(*parents, torch.Generator().manual_seed(birth.seed), strength=birth.strength)


def rate_newborn(parents: Sequence[Member]) -> tuple[float, float]:
    """
    Rating `(mu, sigma)` to start with: mu is the parents' mean, and sigma^2 the mean of their sigma^2 plus
    (prior sigma / 2)^2, at most the prior's. The child is near its parents, but how near has to be seen.

    The paper (as others cite it) starts newborns at the prior, mu 25 and sigma 8.333. In a long run that is far from
    the ratings of the other members, which drift apart (`benchmarks/ratings.py`).
    """
    variance = fmean(parent.sigma**2 for parent in parents) + (PRIOR_SIGMA / 2) ** 2
    return fmean(parent.mu for parent in parents), min(math.sqrt(variance), PRIOR_SIGMA)


def find_learning_roles(rate: float, teachers: float | None) -> tuple[str, ...]:
    """The roles that evolve. With `teacher_learning_rate` set, a role whose learning rate is 0 does not."""
    if teachers is None:
        return ROLES
    return tuple(role for role, own in zip(ROLES, (teachers, rate), strict=True) if own)


class EvolutionCallback(TrainerCallback):
    """
    Replaces the weakest members after every `evolve_every`-th optimizer step, but only when the next one begins. So a
    run never ends on untrained children: the members that are evaluated and saved are trained.

    All ranks draw the same births, because every choice comes from a generator seeded by (seed, step), and breed the
    same children from the same parents; rank 0's copy is broadcast, so that differing hardware cannot part them.

    Every replacement becomes a line of `lineage.jsonl`, written by the main process.

    Args:
        breeding: The settings.
        lineage: The file of the births.
        population: The members.
        read: Factors of a member by name. Collective.
        replace: The trainer's `replace_member`. Collective.
        log: Takes the metrics of each step.
    """

    def __init__(
        self,
        breeding: Breeding,
        lineage: Path,
        population: Population,
        read: Callable[[str], Factors],
        replace: Callable[..., None],
        log: Callable[[Mapping[str, float]], None],
    ):
        self.breeding, self.lineage, self.population = breeding, lineage, population
        self.read, self.replace, self.log = read, replace, log
        self._metrics = self._empty_metrics()

    @staticmethod
    def _empty_metrics() -> dict[str, float]:
        return {"evolve/replaced": 0.0, "time/evolve": 0.0, "evolve/cosine": math.nan}

    def on_step_begin(self, args, state, control, **kwargs):
        started = time.perf_counter()
        self._metrics = self._empty_metrics()
        step = state.global_step
        every = self.breeding.evolve_every
        if every and step and step % every == 0:
            events = self.evolve(step)
            if state.is_world_process_zero and events:
                with self.lineage.open("a") as file:
                    file.writelines(json.dumps(event) + "\n" for event in events)
        self._metrics["time/evolve"] = time.perf_counter() - started
        self.log(self._metrics)

    def evolve(self, step: int) -> list[dict[str, Any]]:
        """
        One event: plan, breed and place every child. Collective.

        Args:
            step: Optimizer steps so far.

        Returns:
            `list[dict]`: The lines of the lineage.
        """
        rng = random.Random(f"evolution {self.breeding.seed} {step}")
        births = plan_births(self.population, self.breeding, rng)
        events = [self._give_birth(birth, step) for birth in births]
        self._metrics["evolve/replaced"] = float(len(events))
        cosines = [event["cosine"][0] for event in events if event["cosine"][0] is not None]
        self._metrics["evolve/cosine"] = fmean(cosines) if cosines else math.nan
        return events

    def _give_birth(self, birth: Birth, step: int) -> dict[str, Any]:
        member, parents = self.population[birth.name], [self.population[name] for name in birth.parents]
        before = {"member": member.identity, "mu": member.mu, "sigma": member.sigma, "age": member.age}
        factors = [self.read(parent.name) for parent in parents]
        child = self._broadcast_from_main(breed(birth, factors))
        likeness = [compare(child, parent) for parent in factors]
        mu, sigma = rate_newborn(parents)
        self.replace(
            birth.name,
            child,
            step=step,
            parents=tuple(parent.identity for parent in parents),
            operator=birth.operator,
            mu=mu,
            sigma=sigma,
        )
        return {
            "step": step,
            "role": birth.role,
            "child": member.identity,
            "replaced": before,
            "parents": [{"member": p.identity, "mu": p.mu, "sigma": p.sigma, "age": p.age} for p in parents],
            "operator": birth.operator,
            "strength": birth.strength,
            "seed": birth.seed,
            "mu": mu,
            "sigma": sigma,
            "cosine": [_drop_nan(pair["cosine"]) for pair in likeness],
            "norm_ratio": [_drop_nan(pair["norm_ratio"]) for pair in likeness],
        }

    def _broadcast_from_main(self, factors: Factors) -> Factors:
        """Rank 0's values on every rank."""
        process = PartialState()
        if process.num_processes == 1:
            return factors
        return {key: broadcast(value.to(process.device)).cpu() for key, value in factors.items()}


def _drop_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
