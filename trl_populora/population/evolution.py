"""Evolution: who goes, who breeds, and the callback that puts the children in place.

    ratings --cull, tournaments--> Birth: name, parents, operator, seed --breed--> factors --replace--> member

Every `evolve_every` optimizer steps children of the survivors replace the lowest-rated members of each role (PopuLoRA,
arXiv 2605.16727). Choosing and breeding are pure functions. Only [`EvolutionCallback`] touches the trainer.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, gather_object
from transformers import TrainerCallback

from trl_populora.options import check_bounds, check_numbers
from trl_populora.population.factors import Factors, compare
from trl_populora.population.members import PRIOR_SIGMA, ROLES, Member, Population
from trl_populora.population.operators import find_operator


# The eight operators that other people's summaries of the paper list; here they have equal weights. The paper's own
# text, as far as we could read it, has three: it perturbs singular values and rotates subspaces (`svd_perturb` does
# both), and it swaps modules. The other crossovers of `CROSSOVERS` are used only if a run names them.
DEFAULT_MUTATIONS = ("svd_perturb", "layer_gaussian", "component_mask", "full_gaussian")
DEFAULT_CROSSOVERS = ("dare", "module_swap", "svd_subspace", "extrapolate")


def read_mixture(
    value: Mapping[str, float] | Sequence[str] | str | None, default: Sequence[str], field: str
) -> dict[str, float]:
    """
    Reads the weights of operators as a config, a YAML file or a command line may give them.

    Args:
        value: A weight for each name, or a list of names, which all get the same weight. Both may also be text: JSON,
            or names with commas between them. `None` stands for the names `default`.
        default: Names of operators.
        field: Name of the option, `"mutations"` or `"crossovers"`.

    Returns:
        Weights by name. Only their ratios matter.

    Raises:
        `ValueError`: If a text begins like JSON and is not JSON, if a name is unknown, if a weight is negative or not
            finite, or if no weight is positive.
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
            raise ValueError(f"`{field}` must have finite weights that are not negative, got {weight!r} for {name!r}.")
    if not sum(weights.values()) > 0:
        raise ValueError(
            f"`{field}` gives no operator a weight above 0, got {value!r}. Give one a positive weight. "
            "`crossover_rate` sets how often a child comes from a crossover: 0 never, 1 whenever two parents are left."
        )
    return {name: float(weight) for name, weight in weights.items()}


@dataclass(frozen=True)
class Birth:
    """
    A planned replacement. Together with the parents' weights it decides the child.

    Args:
        name: Name of the member that goes. The child takes over this name.
        role: Role of the member that goes, and of the child.
        parents: Names of one or two survivors, the fitter one first.
        operator: Name of a mutation (one parent) or of a crossover (two parents).
        strength: Strength of the operator.
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
    When evolution happens, and how it selects and breeds. Each field but `roles` is the option of the same name.

    Args:
        evolve_every: Optimizer steps from one evolution to the next; 0 for none.
        evolve_burn_in: Matches that a member has played before it can be replaced.
        cull_fraction: Fraction of each role that may be replaced, at least one member; 0 replaces nobody.
        crossover_rate: Probability that a child has two parents instead of one.
        tournament_size: Survivors drawn for each parent. The fittest of them is the parent.
        mutations, crossovers: Weights of the operators, see [`read_mixture`].
        mutation_strength: Strength of mutations. Crossovers have strength 1.
        hyperparameter_noise: The `noise` of [`inherit`].
        seed: Decides every random choice, together with the step.
        roles: Roles that evolve.

    Raises:
        `ValueError`: If a value is out of range, or if there is no such operator.
    """

    evolve_every: int = 10
    evolve_burn_in: int = 5
    cull_fraction: float = 0.25
    crossover_rate: float = 0.5
    tournament_size: int = 2
    mutations: Mapping[str, float] | str | None = None
    crossovers: Mapping[str, float] | str | None = None
    mutation_strength: float = 1.0
    hyperparameter_noise: float = 0.0
    seed: int = 0
    roles: tuple[str, ...] = ROLES

    def __post_init__(self):
        check_numbers(self)
        bounds = {
            ">= 0": "evolve_every evolve_burn_in cull_fraction crossover_rate mutation_strength hyperparameter_noise",
            ">= 1": "tournament_size",
            "< 1": "cull_fraction",
            "<= 1": "crossover_rate",
        }
        check_bounds(self, bounds)
        # Read here only for the errors: a wrong name should stop the run before it begins.
        read_mixture(self.mutations, DEFAULT_MUTATIONS, "mutations")
        read_mixture(self.crossovers, DEFAULT_CROSSOVERS, "crossovers")


def cull(members: Sequence[Member], fraction: float, burn_in: int) -> list[Member]:
    """
    Chooses the members of one role that are replaced, the least fit first. The fittest member always stays.

    Args:
        members: All members of the role.
        fraction: Fraction of the members that may be replaced, rounded down, but at least one; 0 replaces nobody.
        burn_in: Members with fewer matches stay, because their ratings say little.
    """
    if fraction <= 0:
        return []
    # Of members with equal ratings the one with the highest index is replaced first, so all ranks choose alike.
    ranked = sorted(members, key=lambda member: (Population.fitness(member), -member.index))
    eligible = [member for member in ranked[:-1] if member.age >= burn_in]
    return eligible[: max(1, int(fraction * len(members)))]


def hold_tournament(candidates: Sequence[Member], size: int, rng: random.Random) -> Member:
    """Draws `size` different candidates (all if there are fewer), and returns the fittest of them."""
    drawn = rng.sample(list(candidates), min(size, len(candidates)))
    return max(drawn, key=lambda member: (Population.fitness(member), -member.index))


def plan_births(population: Population, breeding: Breeding, rng: random.Random) -> list[Birth]:
    """
    Plans the births of one evolution, those of teachers first. Parents are survivors of the same role, so no birth
    depends on another.

    Args:
        population: The members with their ratings. They are not changed.
        breeding: The settings.
        rng: A generator in the same state on every rank.
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
                # Two different parents, and the fitter one first: a crossover treats the two differently.
                others = [survivor for survivor in survivors if survivor is not parents[0]]
                parents.append(hold_tournament(others, breeding.tournament_size, rng))
                parents.sort(key=Population.fitness, reverse=True)
                table, strength = crossovers, 1.0
            (operator,) = rng.choices(list(table), list(table.values()))
            names = tuple(parent.name for parent in parents)
            births.append(Birth(member.name, role, names, operator, strength, rng.getrandbits(63)))
    return births


def breed(birth: Birth, parents: Sequence[Factors]) -> Factors:
    """Computes the child's factors. The same birth and the same parents give the same child."""
    operator = find_operator(birth.operator, "mutations" if len(parents) == 1 else "crossovers")
    return operator(*parents, torch.Generator().manual_seed(birth.seed), strength=birth.strength)


def check_agreement(population: Population, births: Sequence[Birth], step: int) -> None:
    """
    Checks that all ranks have the same members and plan the same births. Collective.

    Raises:
        `RuntimeError`: On every rank, if one of them differs from rank 0. The message names rank, member and values.
    """
    mine = {f"{m['name']}: {key}": value for m in population.state_dict()["members"] for key, value in m.items()}
    mine |= {f"birth {place}": repr(birth) for place, birth in enumerate(births)}
    first, *others = gather_object([mine])
    for rank, theirs in enumerate(others, 1):
        for what in dict.fromkeys([*first, *theirs]):
            if not _is_same(first.get(what), theirs.get(what)):
                raise RuntimeError(
                    f"The ranks have come apart before the evolution after step {step}: {what} is "
                    f"{first.get(what)} on rank 0 and {theirs.get(what)} on rank {rank}. A function of your own may "
                    "give other values on another rank (a kind, a reward, a callback): let it depend on its arguments "
                    "alone."
                )


def _is_same(one: object, other: object) -> bool:
    # Ranks on other hardware may round a rating in another way.
    both_numbers = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other, rel_tol=1e-9) if both_numbers else one == other  # type: ignore[arg-type]


def rate_newborn(parents: Sequence[Member]) -> tuple[float, float]:
    """
    Computes the rating `(mu, sigma)` that a newborn starts with.

    Mu is the mean of the parents. Sigma^2 is the mean of the parents' sigma^2 plus (prior sigma / 2)^2, but not more
    than the prior's: the child is about as good as its parents, and nobody has seen it play.
    """
    # Other people's summaries of the paper say that newborns start at the prior. In a long run the other members'
    # ratings are far from it.
    variance = fmean(parent.sigma**2 for parent in parents) + (PRIOR_SIGMA / 2) ** 2
    return fmean(parent.mu for parent in parents), min(math.sqrt(variance), PRIOR_SIGMA)


def inherit(parent: Member, noise: float, seed: int) -> dict[str, Any]:
    """
    Makes the settings of a child. It gets all settings of its parent except the seed, because a seed belongs to a
    seat. The learning rate is multiplied by exp(noise * z). The argument `seed` decides z, a draw from a standard
    normal distribution (population-based training, arXiv 1711.09846).
    """
    settings = {name: value for name, value in parent.settings.items() if name != "seed"}
    if noise:
        settings["learning_rate"] *= math.exp(noise * random.Random(f"noise {seed}").gauss(0.0, 1.0))
    return settings


def find_learning_roles(rate: float, teachers: float | None) -> tuple[str, ...]:
    """
    Finds the roles that may evolve. If `teacher_learning_rate` is set, a role with learning rate 0 is left out,
    because it does not learn.

    Args:
        rate: The option `learning_rate`.
        teachers: The option `teacher_learning_rate`.
    """
    # Without `teacher_learning_rate` both roles have one learning rate, and both evolve, even if this rate is 0.
    if teachers is None:
        return ROLES
    return tuple(role for role, role_rate in zip(ROLES, (teachers, rate), strict=True) if role_rate)


class EvolutionCallback(TrainerCallback):
    """
    Replaces the weakest members after every `evolve_every`-th optimizer step.

    It waits until the next step begins. So members that are evaluated or saved after a step are trained, and a run
    does not end on untrained children.

    All ranks draw the same births, from a generator that seed and step decide, and breed the same children. Rank 0
    then broadcasts its copy, because other hardware may round in another way.

    Args:
        breeding: The settings.
        population: The members.
        read: Takes a member's name, returns its factors. Collective.
        replace: The trainer's `replace_member`. Collective.
        note: Takes a birth as a line of `lineage.jsonl`.
        log: Takes the metrics of each step.
    """

    def __init__(
        self,
        breeding: Breeding,
        population: Population,
        read: Callable[[str], Factors],
        replace: Callable[..., None],
        note: Callable[[Mapping[str, Any]], None],
        log: Callable[[Mapping[str, float]], None],
    ):
        self.breeding, self.population = breeding, population
        self.read, self.replace, self.note, self.log = read, replace, note, log

    def on_step_begin(self, args, state, control, **kwargs):
        started, step, every = time.perf_counter(), state.global_step, self.breeding.evolve_every
        # Every step logs all three, so a step without births has values, too.
        metrics = {"evolve/replaced": 0.0, "evolve/cosine": math.nan}
        if every and step and step % every == 0:
            events = self.evolve(step)
            for event in events:
                self.note(event)
            cosines = [event["cosine"][0] for event in events if event["cosine"][0] is not None]
            metrics = {"evolve/replaced": float(len(events)), "evolve/cosine": fmean(cosines) if cosines else math.nan}
        self.log(metrics | {"time/evolve": time.perf_counter() - started})

    def evolve(self, step: int) -> list[dict[str, Any]]:
        """
        Plans all births, breeds the children, and puts them in place. Collective.

        Args:
            step: Optimizer steps so far.

        Returns:
            The lines of the lineage, one per child.
        """
        rng = random.Random(f"evolution {self.breeding.seed} {step}")
        births = plan_births(self.population, self.breeding, rng)
        check_agreement(self.population, births, step)
        return [self._give_birth(birth, step) for birth in births]

    def _give_birth(self, birth: Birth, step: int) -> dict[str, Any]:
        """Breeds one child, puts it in place, and returns its line of the lineage. Collective."""
        member, parents = self.population[birth.name], [self.population[name] for name in birth.parents]
        # Recorded now, because `replace` changes the object `member`.
        before = member.record
        factors = [self.read(parent.name) for parent in parents]
        child = self._broadcast_from_main(breed(birth, factors))
        likeness = [compare(child, parent) for parent in factors]
        mu, sigma = rate_newborn(parents)
        noise = self.breeding.hyperparameter_noise
        settings = inherit(parents[0], noise, birth.seed) if parents[0].settings else {}
        self.replace(
            birth.name,
            child,
            step=step,
            parents=tuple(parent.identity for parent in parents),
            operator=birth.operator,
            mu=mu,
            sigma=sigma,
            settings=settings,
        )
        return {
            "step": step,
            "role": birth.role,
            "child": member.identity,
            "replaced": before,
            "parents": [parent.record for parent in parents],
            "operator": birth.operator,
            "strength": birth.strength,
            "seed": birth.seed,
            "mu": mu,
            "sigma": sigma,
            "cosine": [_drop_nan(pair["cosine"]) for pair in likeness],
            "norm_ratio": [_drop_nan(pair["norm_ratio"]) for pair in likeness],
            **({"settings": settings} if settings else {}),
        }

    def _broadcast_from_main(self, factors: Factors) -> Factors:
        """Returns rank 0's values on every rank. Collective."""
        process = PartialState()
        if process.num_processes == 1:
            return factors
        return {key: broadcast(value.to(process.device)).cpu() for key, value in factors.items()}


def _drop_nan(value: float) -> float | None:
    """Turns NaN, which is no JSON, into `None`."""
    return None if math.isnan(value) else value
