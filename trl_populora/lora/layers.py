"""The routed LoRA layer: which member each row belongs to, and all members' low-rank parts beside one base matmul."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from .checks import check_is_base, check_lora_config, check_member_names, is_quantised


BASE = -1  # the index of rows that only the frozen base model computes
BASE_NAME = "base"  # what it is called where members are named


class Route:
    """
    The rows of one forward, sorted out by member.

    Args:
        rows: Member index per row, shape `[R]`; `-1` sends the row to the base model alone.
        factors: One factor per row, shape `[R]`, equal for all rows of a member: the member's gradients are multiplied
            by it (see `trl_populora.step.advantages.compute_member_factors`). Rows of the base are ignored.

    Attributes:
        present (`tuple[int, ...]`): Members with at least one row, ascending.
        counts (`tuple[int, ...]`): Rows of each present member.
        factors (`tuple[float, ...]` or `None`): Gradient factor of each present member.
        ordered (`bool`): Whether the rows already are the present members' segments one after the other.

    Raises:
        `ValueError`: If an index is below -1, the lengths differ, or one member is given two factors.
    """

    def __init__(self, rows: Sequence[int], factors: Sequence[float] | None = None):
        self.rows = tuple(rows)
        if self.rows and min(self.rows) < BASE:
            raise ValueError(f"`rows` must hold member indices >= 0, or -1 for the base model, got {min(self.rows)}.")
        grouped: dict[int, list[int]] = {}
        for position, member in enumerate(self.rows):
            if member != BASE:
                grouped.setdefault(member, []).append(position)
        self.present = tuple(sorted(grouped))
        self.counts = tuple(len(grouped[member]) for member in self.present)
        self._order = [position for member in self.present for position in grouped[member]]
        self.ordered = self._order == list(range(len(self.rows)))
        self.factors = None if factors is None else self._member_factors(factors, grouped)
        self._tensors: dict[Hashable, torch.Tensor] = {}

    def _member_factors(self, factors: Sequence[float], grouped: dict[int, list[int]]) -> tuple[float, ...]:
        if len(factors) != len(self.rows):
            raise ValueError(f"`factors` must have one value per row, got {len(factors)} for {len(self.rows)} rows.")
        for member, positions in grouped.items():
            values = {factors[position] for position in positions}
            if len(values) > 1:
                raise ValueError(
                    f"All rows of a member must carry one factor, got {sorted(values)} for member {member}. Compute "
                    "them with `trl_populora.step.advantages.compute_member_factors`."
                )
        return tuple(float(factors[grouped[member][0]]) for member in self.present)

    @property
    def equal(self) -> bool:
        """Whether all present members have the same number of rows."""
        return len(set(self.counts)) == 1

    def order(self, device: torch.device) -> torch.Tensor:
        """Positions of the members' rows, grouped by member, shape `[R - base rows]`."""
        return self.keep(("order", device), lambda: torch.tensor(self._order, dtype=torch.long).to(device))

    def factor_tensor(self, device: torch.device) -> torch.Tensor:
        """Gradient factors shaped to scale stacked weights, `[present, 1, 1]`, fp32."""
        return self.keep(("factors", device), lambda: torch.tensor(self.factors).view(-1, 1, 1).to(device))

    def keep(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` gave when this key was asked for first: every layer asks, in every forward of the route."""
        if key not in self._tensors:
            self._tensors[key] = make()
        return self._tensors[key]


class Router:
    """
    Holds the route of the forward in progress. The trainer owns it, every routed layer reads it.

    The route has to stay set until the backward is done, because gradient checkpointing runs the forward again during
    the backward. `rows_of` is for forwards without a backward (generation, old and reference log-probabilities).
    """

    def __init__(self) -> None:
        self.route: Route | None = None
        self._only: int | None = None

    def set(self, rows: Sequence[int] | torch.Tensor, factors: Sequence[float] | torch.Tensor | None = None) -> None:
        """Routes the coming forwards: `rows` and `factors` as in [`Route`], each of shape `[R]`."""
        self.route = Route(_as_list(rows), None if factors is None else _as_list(factors))

    def clear(self) -> None:
        """Forgets the route: a forward without one is an error."""
        self.route = None

    @property
    def rows(self) -> tuple[int, ...] | None:
        """Member index per row of the forward in progress, or `None` when no route is set."""
        return None if self.route is None else self.route.rows

    def route_for(self, rows: int) -> Route | None:
        """The route of a batch of so many rows: the one that is set, or the one member of `only`."""
        if self.route is None and self._only is not None:
            return Route([self._only] * rows)
        return self.route

    @contextmanager
    def only(self, member: int) -> Iterator[Router]:
        """Routes every row of the forwards inside the block to one member, however many rows there are."""
        previous, self._only = self._only, member
        try:
            yield self
        finally:
            self._only = previous

    @contextmanager
    def rows_of(self, rows: Sequence[int] | torch.Tensor) -> Iterator[Router]:
        """Routes the forwards inside the block and puts the previous route back afterwards."""
        previous, self.route = self.route, Route(_as_list(rows))
        try:
            yield self
        finally:
            self.route = previous


def _as_list(values: Sequence | torch.Tensor) -> list:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


# The routed LoRA layer: one base matmul for the whole batch, all members' low-rank parts beside it.
#
# Members are ordinary PEFT adapters of ordinary shape; what is special is only the forward. It multiplies by the
# frozen base weight once, stacks the members' `A` and `B`, and applies them to the rows of each member in two batched
# matmuls.


logger = logging.getLogger(__name__)


class RoutedLinear(nn.Module, LoraLayer):
    """
    A PEFT LoRA layer over `nn.Linear` in which every row of the batch has its own adapter.

    The base layer's weights may be in 4 or 8 bits: bitsandbytes' layers are linear layers, too.

    It differs from `peft.tuners.lora.Linear` in three ways. The adapter of a row comes from a [`Router`], not from
    `set_adapter`, so that the recomputation of gradient checkpointing sees the same adapters as the forward did. All
    members are trainable at all times. And members without rows in a batch receive zero gradients instead of none, so
    that DDP and ZeRO never wait for an unused parameter.

    The weights are read without calling the `lora_A` and `lora_B` submodules: under ZeRO-3 they must not be
    partitioned (`stage3_param_persistence_threshold`, see `accelerate_configs/zero3.yaml`).

    Attributes:
        takes_all_tokens (`bool`): Whether inputs `[R * T, in_features]` are the tokens of all rows in their order, as
            the shared expert of a mixture gets them. Of another layer they could be any tokens.
    """

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, r: int, lora_alpha: int, **kwargs
    ):
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self.fan_in_fan_out = config.fan_in_fan_out
        self.router: Router | None = None
        self.members: tuple[str, ...] = ()
        self.takes_all_tokens = False
        self._active_adapter: str | list[str] = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Records the active names. Every member stays trainable whichever is active, unless `inference_mode`."""
        for factors in (self.lora_A, self.lora_B):
            factors.requires_grad_(not inference_mode)
        self._active_adapter = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """
        Args:
            x: Inputs of shape `[R, ..., in_features]`, rows in the order of the route.

        Raises:
            `RuntimeError`: If no route is set, or if ZeRO-3 has partitioned the adapters.
            `ValueError`: If the batch and the route differ in length, the route names a member that does not exist, or
                PEFT's `adapter_names` is used.
        """
        if "adapter_names" in kwargs:
            raise ValueError("`adapter_names` is not used by routed layers: set the rows with `Router.set`.")
        if self.disable_adapters:
            return self.base_layer(x, *args, **kwargs)
        rows = len(self.router.rows or ()) if self.takes_all_tokens and self.router is not None else 0
        if rows and x.ndim == 2 and x.shape[0] % rows == 0:
            return self._by_row(x.unflatten(0, (rows, -1)), *args, **kwargs).flatten(0, 1)
        return self._by_row(x, *args, **kwargs)

    def _by_row(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        route = self._check_route(x)
        result = self.base_layer(x, *args, **kwargs)
        if not route.present:
            return result
        dtype = result.dtype
        # Autocast computes in its own type whatever the inputs have: a copy of them would be kept for the backward.
        inputs = x if torch.is_autocast_enabled(x.device.type) else x.to(self.lora_A[self.members[0]].weight.dtype)
        if route.ordered:
            return (result + self._low_rank(inputs, route)).to(dtype)
        order = route.order(x.device)
        return result.index_add(0, order, self._low_rank(inputs.index_select(0, order), route).to(dtype))

    def _low_rank(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        """`scaling * B_m A_m x` per row; `x` holds the present members' segments in order, `[rows, ..., in]`."""
        # [N, r, in], [N, out, r]. Under a route that decodes weights stay as they are: stacking them for every token
        # made a step 8 % longer. A forward of whole rows stacks once anyway, and need not hold all layers' stacks.
        decodes = x.ndim == 3 and x.shape[1] == 1 and not torch.is_grad_enabled()
        factor_a, factor_b = (
            route.keep((self, name), partial(self._stack, name, route)) if decodes else self._stack(name, route)
            for name in ("lora_A", "lora_B")
        )
        scaling = self.scaling[self.members[0]]
        if route.equal:
            segments = x.reshape(len(route.present), -1, self.in_features)
            hidden = torch.bmm(segments, factor_a.transpose(1, 2)) * scaling
            return torch.bmm(hidden, factor_b.transpose(1, 2)).reshape(*x.shape[:-1], self.out_features)
        parts = zip(x.split(route.counts), factor_a.unbind(), factor_b.unbind(), strict=True)
        return torch.cat([nn.functional.linear(nn.functional.linear(part, a) * scaling, b) for part, a, b in parts])

    def _stack(self, factors: str, route: Route) -> torch.Tensor:
        weights = [getattr(self, factors)[name].weight for name in self.members]
        if weights[0].ndim != 2:
            raise RuntimeError(
                f"`{factors}` has shape {tuple(weights[0].shape)}: ZeRO-3 has partitioned the adapters. Set "
                "`stage3_param_persistence_threshold` above the largest LoRA matrix (`accelerate_configs/zero3.yaml`)."
            )
        scale = None if route.factors is None else route.factor_tensor(weights[0].device)
        return _Stack.apply(route.present, scale, *weights)

    def _check_route(self, x: torch.Tensor) -> Route:
        route = None if self.router is None else self.router.route_for(x.shape[0])
        if route is None:
            raise RuntimeError(
                "No route is set for this forward, so it is not known which member computes which row. To use one "
                "member's model, as in `trainer.model.generate`: `with trainer.member('student_0'):`. Otherwise call "
                "`router.set(rows)` before a forward with a backward (and `router.clear()` after the backward), or "
                "run the forward inside `with router.rows_of(rows):`; -1 is the base model."
            )
        if len(route.rows) != x.shape[0]:
            raise ValueError(
                f"The route has {len(route.rows)} rows, the batch has {x.shape[0]}. Beam search and "
                "`num_return_sequences` multiply rows: repeat the prompts and the route instead. If neither is "
                "meant, the base calls this layer with tokens of several rows at once: leave it out of "
                "`target_modules`."
            )
        if route.present and route.present[-1] >= len(self.members):
            raise ValueError(f"The route names member {route.present[-1]}, there are {len(self.members)} members.")
        return route


class _Stack(torch.autograd.Function):
    """
    Stacks the weights of the present members, `[N, *shape]`.

    Backward gives each present member its slice times its factor, and every other member exact zeros. Scaling here,
    rather than on the loss, leaves the gradient that flows on to the layers below untouched.
    """

    @staticmethod
    def forward(ctx, present: tuple[int, ...], scale: torch.Tensor | None, *weights: torch.Tensor) -> torch.Tensor:
        ctx.present, ctx.scale = present, scale
        return torch.stack([weights[i] for i in present]) if present else weights[0].new_empty(0, *weights[0].shape)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.scale is not None and ctx.present:
            grad = grad * ctx.scale.to(grad.dtype)
        slices = dict(zip(ctx.present, grad.unbind(), strict=True)) if ctx.present else {}
        zero = grad.new_zeros(()).expand(grad.shape[1:])
        needed = enumerate(ctx.needs_input_grad[2:])
        return (None, None, *(slices.get(i, zero) if need else None for i, need in needed))


def add_members(
    model: nn.Module,
    names: Sequence[str],
    lora_config: LoraConfig,
    router: Router,
    seed: int,
    autocast_adapter_dtype: bool = True,
) -> PeftModel:
    """
    Puts one trainable LoRA adapter per member on a base model.

    All members start from the same `A` and from `B = 0`: averaging two factorised adapters keeps 0.82 of their cosine
    when they share the initialisation and 0.50 when they do not, so crossover depends on it.

    Args:
        model: Base model; it is changed in place and frozen.
        names: Member names; a member's position is its index in the route.
        lora_config: One configuration for all members; see [`~trl_populora.lora.checks.check_lora_config`].
        router: Where the layers read the route.
        seed: Seed of the common initialisation. The global random state is left as it is.
        autocast_adapter_dtype: Whether adapters of a half-precision base are kept in fp32. Must be `False` under
            ZeRO-3, which gathers adapters and base into buffers of one type.

    Raises:
        `ValueError`: If the configuration or a name cannot be used; the message says what to do.
        `TypeError`: If `lora_config` is not a `LoraConfig`.
    """
    check_is_base(model)
    check_member_names(names)
    check_lora_config(lora_config, model)
    if is_quantised(model):
        _keep_trainable(model)
    config = copy.deepcopy(lora_config)
    config.task_type = "CAUSAL_LM"
    for position, name in enumerate(names):
        member_config = copy.deepcopy(config)
        member_config._register_custom_module({nn.Linear: RoutedLinear})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if position == 0:
                peft_model = get_peft_model(model, member_config, name, autocast_adapter_dtype=autocast_adapter_dtype)
                # "all-linear" is resolved by now; resolved again it would also look inside the new layers.
                config.target_modules = member_config.target_modules
                config.base_model_name_or_path = member_config.base_model_name_or_path
            else:
                peft_model.add_adapter(name, member_config, autocast_adapter_dtype=autocast_adapter_dtype)
    for layer in routed_layers(peft_model).values():
        layer.router, layer.members = router, tuple(names)
    peft_model.base_model.set_adapter(list(names))
    _check_mixtures(peft_model)
    _check_coverage(peft_model, all_linear=lora_config.target_modules == "all-linear")
    return peft_model


def _keep_trainable(model: nn.Module) -> None:
    """
    Keeps 4-bit layers from packing their weights anew in the first forward in eval mode on a CPU that computes in
    bf16: no gradient passes through layers that are packed so (bitsandbytes 0.50).
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def _check_mixtures(model: PeftModel) -> None:
    """Lets shared experts take all tokens; refuses other layers of a mixture, which get tokens of any rows."""
    modules = dict(model.named_modules())
    mixtures = [path for path, module in modules.items() if "experts" in module._modules]
    for path, layer in routed_layers(model).items():
        for mixture in mixtures:
            if not path.startswith(f"{mixture}."):
                continue
            inside = path[len(mixture) + 1 :]
            if not inside.startswith("shared"):
                raise ValueError(
                    f"`target_modules` takes in {inside!r} of the mixture of experts {mixture!r}, which is called "
                    "with tokens that are not in the order of the rows, so they cannot be routed by row. Name "
                    "`target_modules` that leave it out, as the attention's: q_proj, k_proj, v_proj, o_proj."
                )
            layer.takes_all_tokens = True


def _check_coverage(model: PeftModel, all_linear: bool) -> None:
    """Refuses layers that PEFT wrapped in its own; says so where the linear layers are a small part of the base."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if stray := sorted({type(m.get_base_layer()).__name__ for m in layers if not isinstance(m, RoutedLinear)}):
        raise ValueError(
            f"The base has target layers of type `{', '.join(stray)}`; only `nn.Linear` layers are routed by row. "
            "Name `target_modules` that are (of a mixture of experts, its attention: q_proj, k_proj, v_proj, "
            "o_proj), or choose another base."
        )
    base = model.get_base_model()
    shared = {id(e.weight) for e in (base.get_input_embeddings(), base.get_output_embeddings()) if e is not None}
    others = {id(p): p for p in base.parameters() if p.ndim > 1 and id(p) not in shared}
    for layer in layers:
        for known in (layer.get_base_layer().weight, *layer.lora_A.parameters(), *layer.lora_B.parameters()):
            others.pop(id(known), None)
    adapted = sum(layer.in_features * layer.out_features for layer in layers)  # a quantised weight holds fewer numbers
    share = adapted / max(1, adapted + sum(map(_size, others.values())))
    if all_linear and share < 0.5:
        logger.warning(
            "Members adapt %.0f %% of the base's weights, embeddings apart. The others, as experts of a mixture "
            "often are, "
            "are in no `nn.Linear` and stay frozen.",
            100 * share,
        )


def _size(weight: torch.Tensor) -> int:
    """Number of elements; ZeRO-3 keeps it aside."""
    return int(getattr(weight, "ds_numel", weight.numel()))


def routed_layers(model: nn.Module) -> dict[str, RoutedLinear]:
    """Routed layers of a model, by dotted name in `model.named_modules()`."""
    found: dict[str, RoutedLinear] = {}

    def walk(module: nn.Module, path: str) -> None:
        if isinstance(module, RoutedLinear):
            found[path] = module  # not into it: most modules of a large population are members' factors
            return
        for name, child in module.named_children():
            walk(child, f"{path}.{name}" if path else name)

    walk(model, "")
    return found
