"""The routed LoRA layer: which member computes each row, and how all members compute in one forward.

    Router.set(rows [R]) --> Route: rows by member
                                |
    x [R, T, in] --+-- base_layer, once for all rows ------------------> [R, T, out] --(+)--> [R, T, out]
                   `-- rows of each member --A [N, r, in], B [N, out, r]--> [R, T, out] --'

Members are ordinary PEFT adapters of ordinary shape. Only the forward is special: it multiplies by the frozen base
weight once, and stacks the factors of the members that have rows. If these members have equally many rows, two batched
matmuls apply the stacks.

Shapes: R rows of a batch, T tokens, M members, N members with rows in the batch, r LoRA rank.
"""

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

from .checks import check_is_base, check_lora_config, is_quantised


logger = logging.getLogger(__name__)

BASE = -1  # the member index of rows that the frozen base model computes alone
BASE_NAME = "base"  # the name of the base model, wherever members go by names


class Route:
    """
    The rows of one forward, grouped by member.

    A member is *present* if it has at least one row.

    Args:
        rows: Member index per row, shape `[R]`; `-1` sends the row to the base model alone.
        factors: One factor per row, shape `[R]`. The gradients of a member are multiplied by its factor (see
            [`~trl_populora.step.advantages.compute_member_factors`]), so all rows of a member must have the same one.
            Factors of rows of the base are ignored.

    Attributes:
        present (`tuple[int, ...]`): Indices of the present members, ascending, shape `[N]`.
        counts (`tuple[int, ...]`): Number of rows of each present member, shape `[N]`.
        factors (`tuple[float, ...]` or `None`): Gradient factor of each present member, shape `[N]`.
        ordered (`bool`): Whether the batch holds all rows of the first present member, then all rows of the next, and
            no row of the base.

    Raises:
        `ValueError`: If an index is below -1, if `factors` and `rows` differ in length, or if the rows of one member
            have different factors.
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
        # The layer is faster with an ordered batch, because it need not gather the rows of a member.
        self._order = [position for member in self.present for position in grouped[member]]
        self.ordered = self._order == list(range(len(self.rows)))
        self.factors = None if factors is None else self._read_factors(factors, grouped)
        self._tensors: dict[Hashable, torch.Tensor] = {}

    def _read_factors(self, factors: Sequence[float], grouped: dict[int, list[int]]) -> tuple[float, ...]:
        """Takes one factor per present member from one factor per row."""
        if len(factors) != len(self.rows):
            raise ValueError(f"`factors` must have one value per row, got {len(factors)} for {len(self.rows)} rows.")
        for member, positions in grouped.items():
            values = {factors[position] for position in positions}
            if len(values) > 1:
                raise ValueError(
                    f"All rows of a member must carry one factor, got {sorted(values)} for member {member}. Compute "
                    "factors with `trl_populora.step.advantages.compute_member_factors`."
                )
        return tuple(float(factors[grouped[member][0]]) for member in self.present)

    @property
    def equal(self) -> bool:
        """Whether there are present members, and all of them have the same number of rows."""
        return len(set(self.counts)) == 1

    def order(self, device: torch.device) -> torch.Tensor:
        """Returns the positions of the members' rows, grouped by member, shape `[R - base rows]`."""
        return self.keep(("order", device), lambda: torch.tensor(self._order, dtype=torch.long).to(device))

    def factor_tensor(self, device: torch.device) -> torch.Tensor:
        """Returns the gradient factors in fp32, `[N, 1, 1]`. They multiply the gradients of stacks, `[N, ., .]`."""
        return self.keep(("factors", device), lambda: torch.tensor(self.factors).view(-1, 1, 1).to(device))

    def keep(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Makes the tensor of a key at the first call, and returns the same tensor at every later call."""
        # All routed layers need the same tensors. Kept here, a tensor is copied to the GPU once, not once per layer.
        if key not in self._tensors:
            self._tensors[key] = make()
        return self._tensors[key]


class Router:
    """
    Holds the route of the forward in progress. The trainer has one router, and every routed layer reads it.

    [`set`] and [`clear`] go around a forward and its backward. The route must stay set until the backward is done,
    because gradient checkpointing runs the forward again during the backward. [`route_to`] is for forwards without a
    backward: generation, and old and reference log-probabilities.
    """

    def __init__(self) -> None:
        self.route: Route | None = None
        self._only: int | None = None

    def set(self, rows: Sequence[int] | torch.Tensor, factors: Sequence[float] | torch.Tensor | None = None) -> None:
        """Sets the route of the forwards that follow. `rows` and `factors` are as in [`Route`], each `[R]`."""
        self.route = Route(_as_list(rows), None if factors is None else _as_list(factors))

    def clear(self) -> None:
        """Forgets the route. A forward of the members then raises an error, except inside [`only`]."""
        self.route = None

    @property
    def members(self) -> tuple[int, ...] | None:
        """Member index of each row of the forward in progress, shape `[R]`; `None` if no route is set."""
        return None if self.route is None else self.route.rows

    def find_route(self, rows: int) -> Route | None:
        """
        Finds the route of a batch of `rows` rows: the route that is set, or inside [`only`] a route of all rows to its
        member. `None` if there is neither.
        """
        if self.route is None and self._only is not None:
            return Route([self._only] * rows)
        return self.route

    @contextmanager
    def only(self, member: int) -> Iterator[Router]:
        """
        Routes every row of the forwards inside the block to one member, whatever the number of rows. If a route is
        set as well, that route counts.
        """
        previous, self._only = self._only, member
        try:
            yield self
        finally:
            self._only = previous

    @contextmanager
    def route_to(self, members: Sequence[int] | torch.Tensor) -> Iterator[Router]:
        """
        Sets a route for the forwards inside the block, and puts the previous route back afterwards. `members` has the
        member index of each row, `[R]`.
        """
        previous, self.route = self.route, Route(_as_list(members))
        try:
            yield self
        finally:
            self.route = previous


def _as_list(values: Sequence | torch.Tensor) -> list:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


class RoutedLinear(nn.Module, LoraLayer):
    """
    A PEFT LoRA layer over `nn.Linear` in which every row of a batch has the adapter of its member.

    The base layer may hold 4-bit or 8-bit weights: bitsandbytes' layers are subclasses of `nn.Linear`.

    The main differences from `peft.tuners.lora.Linear`:

    - A [`Router`] says which adapter a row has, not `set_adapter`. So gradient checkpointing, which computes the
      forward again in the backward, finds the same adapters.
    - Members are trainable whether PEFT has them active or not.
    - A member that has no rows in a batch gets a zero gradient, not `None`. So DDP and ZeRO
      never wait for a parameter without a gradient.

    The layer reads the weights of `lora_A` and `lora_B` without calling these submodules. So ZeRO-3, which gathers
    the parameters of a module when the module is called, must not partition them (see
    [`~trl_populora.lora.members.keep_adapters_whole`]).

    Attributes:
        takes_all_tokens (`bool`): Whether a 2-D input, `[R * T, in_features]`, holds all tokens of all rows in order.
            That is so in the shared expert of a mixture of experts. In other layers some tokens may be missing.
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
        """Notes the active names. Makes all members trainable, active or not; with `inference_mode`, none."""
        # PEFT's method would freeze all adapters but the active one, and members train together.
        for factors in (self.lora_A, self.lora_B):
            factors.requires_grad_(not inference_mode)
        self._active_adapter = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """
        Computes every row with the base layer and its member's adapter.

        Args:
            x: Inputs of shape `[R, ..., in_features]`, rows in the order of the route. A layer that
                `takes_all_tokens` takes `[R * T, in_features]`, too.

        Raises:
            `RuntimeError`: If there is no route (see [`Router.find_route`]), or ZeRO-3 has partitioned the adapters.
            `ValueError`: If batch and route have different numbers of rows, if the route names a member that does not
                exist, or if PEFT's `adapter_names` is passed.
        """
        if "adapter_names" in kwargs:
            raise ValueError("`adapter_names` is not used by routed layers: set the rows with `Router.set`.")
        # Inside PEFT's `disable_adapter()` the base computes alone, so no route is needed.
        if self.disable_adapters:
            return self.base_layer(x, *args, **kwargs)
        # The tokens of a 2-D input are grouped into rows. Inside `only` no route is set, so `rows` is 0 and each token
        # counts as a row. That is right, too: all tokens belong to one member.
        rows = len(self.router.members or ()) if self.takes_all_tokens and self.router is not None else 0
        if rows and x.ndim == 2 and x.shape[0] % rows == 0:
            return self._forward_rows(x.unflatten(0, (rows, -1)), *args, **kwargs).flatten(0, 1)
        return self._forward_rows(x, *args, **kwargs)

    def _forward_rows(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Computes inputs `[R, ..., in_features]`, whose first dimension is rows."""
        route = self._check_route(x)
        result = self.base_layer(x, *args, **kwargs)
        if not route.present:
            return result
        dtype = result.dtype
        # Autocast casts the inputs of a matmul by itself. A cast here would keep an fp32 copy for the backward.
        inputs = x if torch.is_autocast_enabled(x.device.type) else x.to(self.lora_A[self.members[0]].weight.dtype)
        if route.ordered:
            return (result + self._compute_low_rank(inputs, route)).to(dtype)
        # `order` leaves out rows of the base: `index_add` returns those as the base layer has computed them.
        order = route.order(x.device)
        return result.index_add(0, order, self._compute_low_rank(inputs.index_select(0, order), route).to(dtype))

    def _compute_low_rank(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        """
        Computes `scaling * B_m A_m x` for each row of a member m.

        Args:
            x: Inputs, `[rows, ..., in]`: all rows of the first present member, then all rows of the next.
        """
        # Weights do not change while tokens are decoded, so the route keeps the stacks [N, r, in] and [N, out, r] of
        # every layer: stacking for every token made a step 8 % longer. A forward of whole rows stacks once, and
        # keeping its stacks would only hold memory.
        decodes = x.ndim == 3 and x.shape[1] == 1 and not torch.is_grad_enabled()
        factor_a, factor_b = (
            route.keep((self, name), partial(self._stack, name, route)) if decodes else self._stack(name, route)
            for name in ("lora_A", "lora_B")
        )
        scalings = [self.scaling[self.members[member]] for member in route.present]
        # With equally many rows per member, two batched matmuls compute all members.
        if route.equal:
            segments = x.reshape(len(route.present), -1, self.in_features)
            hidden = _scale(torch.bmm(segments, factor_a.transpose(1, 2)), scalings, route)
            return torch.bmm(hidden, factor_b.transpose(1, 2)).reshape(*x.shape[:-1], self.out_features)
        linear = nn.functional.linear
        parts = zip(x.split(route.counts), factor_a.unbind(), factor_b.unbind(), scalings, strict=True)
        return torch.cat([linear(linear(part, a) * scaling, b) for part, a, b, scaling in parts])

    def _stack(self, factors: str, route: Route) -> torch.Tensor:
        """Stacks `lora_A` or `lora_B` of the present members, `[N, r, in]` or `[N, out, r]`."""
        # `_Stack` gets the weights of all members, present or not. So each weight gets a gradient.
        weights = [getattr(self, factors)[name].weight for name in self.members]
        if weights[0].ndim != 2:
            raise RuntimeError(
                f"`{factors}` has shape {tuple(weights[0].shape)}: ZeRO-3 has partitioned the adapters. Set "
                "`stage3_param_persistence_threshold` above the largest LoRA matrix (`accelerate_configs/zero3.yaml`)."
            )
        scale = None if route.factors is None else route.factor_tensor(weights[0].device)
        return _Stack.apply(route.present, scale, *weights)

    def _check_route(self, x: torch.Tensor) -> Route:
        """Finds the route of a batch. Raises if no route is set, or if it does not fit the batch."""
        route = None if self.router is None else self.router.find_route(x.shape[0])
        if route is None:
            raise RuntimeError(
                "No route is set for this forward, so it is not known which member computes which row. To use one "
                "member's model, as in `trainer.model.generate`: `with trainer.member('student_0'):`. Otherwise call "
                "`router.set(rows)` before a forward with a backward (and `router.clear()` after the backward), or "
                "run the forward inside `with router.route_to(members):`; -1 is the base model."
            )
        if len(route.rows) != x.shape[0]:
            raise ValueError(
                f"The route has {len(route.rows)} rows, the batch has {x.shape[0]}. A route needs one member for each "
                "row of the batch. Beam search and `num_return_sequences` multiply rows: repeat the prompts and the "
                "route instead. Or the base calls this layer with tokens of several rows at once: then leave the "
                "layer out of `target_modules`."
            )
        if route.present and route.present[-1] >= len(self.members):
            raise ValueError(
                f"The route names member {route.present[-1]}, there are {len(self.members)} members (indices from 0)."
            )
        return route


def _scale(hidden: torch.Tensor, scalings: Sequence[float], route: Route) -> torch.Tensor:
    """Multiplies each present member's part of `hidden`, `[N, ., r]`, by its scaling."""
    if len({*scalings}) == 1:
        return hidden * scalings[0]
    key = ("scalings", *scalings, hidden.device)
    factors = route.keep(key, lambda: torch.tensor(scalings).view(-1, 1, 1).to(hidden.device))
    # The scalings are a tensor in fp32. So torch multiplies in fp32, and the product is rounded, as with a Python
    # number. In bf16 the scalings themselves would be rounded, before they multiply anything.
    return (hidden * factors).to(hidden.dtype)


class _Stack(torch.autograd.Function):
    """
    Stacks the weights of the present members: `[N, *shape]` from M weights of shape `shape`.

    In the backward each present member gets its slice of the gradient, times its factor. Other members get zeros.
    The factor is applied here, not to the loss, so that it does not change the gradient that flows to the layers
    below.
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
        zero = grad.new_zeros(()).expand(grad.shape[1:])  # a view of one zero as a matrix: takes no memory
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

    All members start from the same `A` and from `B = 0`. So a member adds nothing at first, and a crossover of two
    members, which is truncated to rank r, loses less of them than if they had begun with different `A`.

    Args:
        model: Base model; it is changed in place and frozen.
        names: Member names. A member's position here is its index in routes.
        lora_config: One configuration for all members; see [`~trl_populora.lora.checks.check_lora_config`].
        router: The routed layers read their route from it.
        seed: Seed of the common `A`. The global random state does not change.
        autocast_adapter_dtype: Whether adapters of a half-precision base are kept in fp32. Must be `False` under
            ZeRO-3, which gathers adapters and base into buffers of one type.

    Raises:
        `ValueError`: If the configuration or the base cannot be used.
        `TypeError`: If `lora_config` is not a `LoraConfig`.
    """
    check_is_base(model)
    check_lora_config(lora_config, model)
    if is_quantised(model):
        _keep_trainable(model)
    config = copy.deepcopy(lora_config)
    config.task_type = "CAUSAL_LM"
    for position, name in enumerate(names):
        # Each member gets a copy, because PEFT writes into the configuration that it is given.
        member_config = copy.deepcopy(config)
        member_config._register_custom_module({nn.Linear: RoutedLinear})
        # The same seed gives every member the same A. PEFT draws it on the CPU, so only the CPU's generator is seeded
        # and put back: `torch.manual_seed` would change the generators of GPUs as well.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            if position == 0:
                peft_model = get_peft_model(model, member_config, name, autocast_adapter_dtype=autocast_adapter_dtype)
                # PEFT has turned "all-linear" into names of modules. The next members get these names: with
                # "all-linear" PEFT would now find the new `lora_A` and `lora_B`, too.
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
    Keeps gradients flowing through 4-bit layers on a CPU that computes in bf16.

    In the first forward in eval mode bitsandbytes 0.50 packs the weights of a layer anew, and no gradient passes a
    layer that is packed that way.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def _check_mixtures(model: PeftModel) -> None:
    """Marks layers of shared experts as taking all tokens, and refuses other layers inside a mixture of experts."""
    modules = dict(model.named_modules())
    mixtures = [path for path, module in modules.items() if "experts" in module._modules]
    for path, layer in routed_layers(model).items():
        for mixture in mixtures:
            if not path.startswith(f"{mixture}."):
                continue
            # A shared expert gets all tokens, in order. Every other expert gets the tokens that the mixture chooses.
            inside = path[len(mixture) + 1 :]
            if not inside.startswith("shared"):
                raise ValueError(
                    f"`target_modules` takes in {inside!r} of the mixture of experts {mixture!r}. Modules inside a "
                    "mixture may get tokens of any rows in any order, which cannot be routed by row. Set "
                    "`target_modules` to modules outside it, such as the attention's q_proj, k_proj, v_proj, o_proj."
                )
            layer.takes_all_tokens = True


def _check_coverage(model: PeftModel, all_linear: bool) -> None:
    """
    Refuses layers that PEFT wrapped in its own classes. With `all_linear`, warns if members adapt less than half of
    the base's weights.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if stray := sorted({type(m.get_base_layer()).__name__ for m in layers if not isinstance(m, RoutedLinear)}):
        raise ValueError(
            f"The base has target layers of type `{', '.join(stray)}`; only `nn.Linear` layers are routed by row. "
            "Set `target_modules` to `nn.Linear` layers (with a mixture of experts, the attention's q_proj, k_proj, "
            "v_proj, o_proj), or choose another base."
        )
    base = model.get_base_model()
    # From here on: which share of the base's weights do members adapt? Embeddings, the output head and vectors such as
    # norms are left out of the count, because `all-linear` adapts them in no model.
    shared = {id(e.weight) for e in (base.get_input_embeddings(), base.get_output_embeddings()) if e is not None}
    others = {id(p): p for p in base.parameters() if p.ndim > 1 and id(p) not in shared}
    for layer in layers:
        for known in (layer.get_base_layer().weight, *layer.lora_A.parameters(), *layer.lora_B.parameters()):
            others.pop(id(known), None)
    # Weights are counted by features, not by elements: a quantised weight packs several numbers into one element.
    adapted = sum(layer.in_features * layer.out_features for layer in layers)
    share = adapted / max(1, adapted + sum(map(_count_elements, others.values())))
    if all_linear and share < 0.5:
        logger.warning(
            "Members adapt %.0f %% of the base's weights, embeddings apart. The other weights stay frozen, because "
            "PEFT found them in no `nn.Linear`: experts of a mixture, for example.",
            100 * share,
        )


def _count_elements(weight: torch.Tensor) -> int:
    """Counts the elements of a weight. ZeRO-3 empties a partitioned weight and keeps the number in `ds_numel`."""
    return int(getattr(weight, "ds_numel", weight.numel()))


def routed_layers(model: nn.Module) -> dict[str, RoutedLinear]:
    """Finds the routed layers of a model. The keys are their names in `model.named_modules()`."""
    found: dict[str, RoutedLinear] = {}

    def walk(module: nn.Module, path: str) -> None:
        if isinstance(module, RoutedLinear):
            # The walk stops here: in a large population most modules are the factors inside routed layers.
            found[path] = module
            return
        for name, child in module.named_children():
            walk(child, f"{path}.{name}" if path else name)

    walk(model, "")
    return found
