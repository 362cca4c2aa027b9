"""
Makes the embedded tiny base: a 2.8M-parameter Qwen3 trained from scratch on executed synthetic programs.

It learns to know some operations of `tiny_programs.py` and to half-know the others; the shipped weights hold the known
ones alone. Full run (about an hour on two quiet cores, each with its own half of every batch; then the gate):

    torchrun --nproc_per_node 2 studies/make_tiny_base.py --steps 5000 --work runs/tiny_base --output
    runs/tiny_base/model python studies/tiny_gate.py --model runs/tiny_base/model

`--start DIR` goes on from the weights and the tokenizer of a model that this recipe wrote, such as the shipped one:

    python studies/make_tiny_base.py --start trl_populora/assets/tiny --steps 3000 --muon-rate 0.01 --work
    runs/tiny_base --output runs/tiny_base/model

Smoke run (under a minute; the weights are useless, every step of the way is taken):

    python studies/make_tiny_base.py --smoke --work /tmp/tiny_base --output /tmp/tiny_base/model

A run that was interrupted goes on with `--resume`. `--export-only` writes the model of the last checkpoint (its weight
average) at any time, also while the training goes on. The run is a function of its seed, its steps and the number of
processes. `tiny_scores.py` writes the figures and the model card, and the tasks that ship beside the model. Leaves out
on purpose: validation during training, GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Full

import beside_recipes  # noqa: F401
import torch
import torch.distributed
import torch.nn.functional as F
from tiny_documents import Batch, Layout, Source
from tiny_tokenizer import train_tokenizer
from tokenizers import Tokenizer
from transformers import AttentionInterface, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


USER_WEIGHT = 0.03  # loss weight of the user's tokens; the assistant's have 1
AVERAGE_DECAY = 0.995  # of the weight average that early exports take
FLAT_UNTIL = 0.35  # share of the run at the peak learning rate, then linear to zero
WARM_UP_STEPS = 40


@dataclass
class Progress:
    """What has been trained so far; saved with the weights."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    answer_tokens: int = 0
    losses: list[float] = field(default_factory=list)


def packed_attention(module, query, key, value, mask, scaling, dropout=0.0, **kwargs):
    """
    Attention under an additive mask `[R, 1, T, T]`, as three plain products: on a CPU, at these sizes, its backward is
    twice as fast as the fused kernel's.
    """
    rows, heads, length, width = query.shape
    flat = (rows * heads, length, width)
    scores = (query * scaling).reshape(flat) @ key.reshape(flat).transpose(1, 2)
    weights = torch.softmax(scores.view(rows, heads, length, length) + mask, dim=-1)
    mixed = weights.view(rows * heads, length, length) @ value.reshape(flat)
    return mixed.view(rows, heads, length, width).transpose(1, 2), None


def new_model(tokenizer, layers: int, width: int) -> Qwen3ForCausalLM:
    """A randomly initialised model; the residual projections start at zero, so depth costs no early instability."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        intermediate_size=128 * round(width * 8 / 3 / 128),
        max_position_embeddings=1024,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        populora_prompt_style="compact",  # how the trainer knows which prompts this base understands
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def new_optimizers(model: Qwen3ForCausalLM, muon_rate: float, adam_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = set(map(id, matrices))
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    muon = torch.optim.Muon(matrices, lr=muon_rate, momentum=0.95, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def attention_mask(batch: Batch) -> torch.Tensor:
    """Additive bf16 mask `[R, 1, T, T]` of a packed batch; padding sees itself, which keeps the softmax finite."""
    documents, branches = torch.from_numpy(batch.documents), torch.from_numpy(batch.branches)
    same = documents[:, :, None] == documents[:, None, :]
    visible = (branches[:, None, :] == 0) | (branches[:, :, None] == branches[:, None, :])
    length = documents.shape[1]
    mask = same & visible & torch.ones(length, length, dtype=torch.bool).tril()
    return torch.where(mask, 0.0, -1e4).to(torch.bfloat16)[:, None]


def loss_sums(model: Qwen3ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    """Weighted loss and weights summed over a packed batch; then the plain loss sum and count of answer tokens."""
    tokens = torch.from_numpy(batch.tokens).long()
    positions = torch.from_numpy(batch.positions).long()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(
            input_ids=tokens, attention_mask=attention_mask(batch), position_ids=positions, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden[:, :-1])
    documents, branches = torch.from_numpy(batch.documents), torch.from_numpy(batch.branches)
    answers = torch.from_numpy(batch.answers)[:, 1:]
    follows = (documents[:, 1:] == documents[:, :-1]) & (branches[:, 1:] == branches[:, :-1]) & (documents[:, 1:] >= 0)
    weights = torch.where(answers, 1.0, USER_WEIGHT) * follows
    losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view_as(weights)
    return (losses * weights).sum(), weights.sum(), float(losses.detach()[answers].sum()), int(answers.sum())


def produce(queue, source: Source, start: int, tokenizer_text: str, end_of_turn: int, pad: int) -> None:
    """Writes batches into `queue`, in a process of its own and at low priority, so that training never waits."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.nice(5)
    queue.cancel_join_thread()
    parent = multiprocessing.parent_process()
    for batch in source.batches(start, Tokenizer.from_str(tokenizer_text), end_of_turn, pad):
        while parent is not None:
            try:
                queue.put(batch, timeout=5)
                break
            except Full:  # the trainer is slow, or was killed and will never take another batch
                if not parent.is_alive():
                    return


def learning_rate_factor(step: int, done: float) -> float:
    """Warm-up over steps, then flat, then linear to zero over the share `done` of the run."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, (1 - done) / (1 - FLAT_UNTIL)))


def save_checkpoint(path: Path, model, average, optimizers, progress: Progress) -> None:
    """Writes next to the target first, so an interruption never leaves a broken checkpoint; the main process does."""
    if not is_main():
        return
    state = {
        "model": model.state_dict(),
        "average": average,
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": vars(progress),
    }
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def export(model: Qwen3ForCausalLM, weights: dict[str, torch.Tensor], tokenizer, output: Path) -> None:
    """Writes a model directory in fp16: weights, configurations, tokenizer with its chat template."""
    exported = Qwen3ForCausalLM(model.config)
    exported.load_state_dict(weights)
    exported.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    exported.half().save_pretrained(output)
    tokenizer.save_pretrained(output, save_jinja_files=False)


def how_it_was_made(arguments: argparse.Namespace, progress: Progress) -> str:
    """The sentence of the model card; the options that shape the run, not where it writes."""
    world = arguments.source.world
    launcher = f"torchrun --nproc_per_node {world}" if world > 1 else "python"
    start = f"--start {arguments.start} " if arguments.start else ""
    return (
        f"`{launcher} studies/make_tiny_base.py {start}--work DIR --output DIR --steps {arguments.steps} "
        f"--muon-rate {arguments.muon_rate:g} --seed {arguments.seed}`: "
        f"{progress.step} steps, {progress.tokens / 1e6:.1f}M tokens ({progress.answer_tokens / 1e6:.1f}M of them "
        f"answers), {progress.seconds / 60:.0f} minutes on {world} shared CPU core(s)."
    )


def train(arguments: argparse.Namespace, tokenizer, model: Qwen3ForCausalLM) -> Progress:
    """Trains until `--steps` are used up; leaves the final weights in the checkpoint's average too."""
    optimizers = new_optimizers(model, arguments.muon_rate, arguments.adam_rate)
    average = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    progress = Progress()
    checkpoint = arguments.work / "checkpoint.pt"
    if arguments.resume:
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        average, progress = state["average"], Progress(**state["progress"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            peaks = [group["peak"] for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["peak"] = peak  # the rates of the command line rule, also over a resumed run's
    queue = multiprocessing.get_context("spawn").Queue(maxsize=8)
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    source = (arguments.source, progress.step, tokenizer.backend_tokenizer.to_str(), *ends)
    producer = multiprocessing.get_context("spawn").Process(target=produce, args=(queue, *source), daemon=True)
    producer.start()
    last, saved_at, shown = time.perf_counter(), progress.seconds, []
    try:
        while (done := progress.step / arguments.steps) < 1:
            factor = learning_rate_factor(progress.step, done)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * factor
            shown.append(train_step(model, optimizers, queue.get(timeout=300), progress))
            update_average(average, model, progress.step)
            now = time.perf_counter()
            progress.seconds, last = progress.seconds + now - last, now
            if progress.step % arguments.log_every == 0:
                if is_main():
                    report(shown, progress, factor, done)
                progress.losses.append(sum(shown) / len(shown))
                shown.clear()
            if progress.seconds - saved_at > 60 * arguments.save_minutes:
                save_checkpoint(checkpoint, model, average, optimizers, progress)
                saved_at = progress.seconds
    finally:
        producer.terminate()
    average = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    save_checkpoint(checkpoint, model, average, optimizers, progress)
    return progress


def is_main() -> bool:
    """Whether this process reports and saves; the weights of all are equal."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def summed(weights: list[torch.nn.Parameter], *counts: float) -> list[float]:
    """Adds up gradients, in place, and counts over the processes; returns the counts."""
    if not torch.distributed.is_initialized():
        return list(counts)
    flat = torch.cat([*(weight.grad.flatten() for weight in weights), torch.tensor(counts)])
    torch.distributed.all_reduce(flat)
    sizes = [weight.numel() for weight in weights]
    *gradients, totals = flat.split([*sizes, len(counts)])
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad.copy_(gradient.view_as(weight))
    return totals.tolist()


def train_step(model, optimizers, parts: tuple[Batch, ...], progress: Progress) -> float:
    """One optimizer step over the parts of a batch; returns the mean loss of the answer tokens."""
    weight_sum, plain, count, tokens = 0.0, 0.0, 0, 0
    for part in parts:
        loss, weights, part_plain, part_count = loss_sums(model, part)
        loss.backward()
        weight_sum += float(weights)
        plain, count = plain + part_plain, count + part_count
        tokens += int((part.documents >= 0).sum())
    trained = list(model.parameters())
    weight_sum, plain, count, tokens = summed(trained, weight_sum, plain, count, tokens)
    for weight in trained:
        weight.grad /= weight_sum
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    progress.step += 1
    progress.tokens += int(tokens)
    progress.answer_tokens += int(count)
    if not math.isfinite(plain):
        raise RuntimeError(f"the loss is {plain} at step {progress.step}; lower `--muon-rate` or `--adam-rate`.")
    return plain / count


def update_average(average: dict[str, torch.Tensor], model, step: int) -> None:
    """Moves the weight average; its memory grows with the run, so that the first steps are soon forgotten."""
    keep = min(AVERAGE_DECAY, step / (step + 20))
    for name, weight in model.state_dict().items():
        average[name].lerp_(weight, 1 - keep)


def report(losses: list[float], progress: Progress, factor: float, done: float) -> None:
    rate = progress.tokens / max(progress.seconds, 1e-9)
    print(
        f"step {progress.step:5d} | {done:4.0%} | loss {sum(losses) / len(losses):.4f} | lr x{factor:.2f} | "
        f"{progress.tokens / 1e6:.2f}M tokens | {rate:.0f} tok/s | {progress.seconds / 60:.1f} min",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory of tokenizer and checkpoint")
    parser.add_argument("--output", type=Path, help="model directory to write")
    parser.add_argument("--start", type=Path, help="model directory to go on from; else from scratch")
    parser.add_argument("--steps", type=int, default=0, help="length of the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=192, help="a multiple of the head width, 64")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=40, help="steps")
    parser.add_argument("--save-minutes", type=float, default=3.0)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --work")
    parser.add_argument("--export-only", action="store_true", help="write the checkpoint's weight average to --output")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, a few steps")
    arguments = parser.parse_args()
    layout = Layout()
    if arguments.smoke:
        arguments.layers, arguments.width, arguments.steps, arguments.log_every = 2, 64, 4, 1
        layout = Layout(4, 256, 1, 448)
    if arguments.width % 64:
        parser.error(f"--width must be a multiple of 64, got {arguments.width}")
    if arguments.start and not (arguments.start / "model.safetensors").is_file():
        parser.error(f"--start {arguments.start} holds no model.safetensors")
    if arguments.steps < 1 and not arguments.export_only:
        parser.error(f"give --steps, at least 1, got {arguments.steps}")
    if (arguments.resume or arguments.export_only) and not (arguments.work / "checkpoint.pt").is_file():
        parser.error(f"there is no checkpoint in {arguments.work}")
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    arguments.source = Source(arguments.seed, arguments.steps, rank, world, layout)
    return arguments


def the_tokenizer(arguments: argparse.Namespace) -> PreTrainedTokenizerFast:
    """A new tokenizer, or that of the weights to go on from: its token numbers are part of them."""
    saved = arguments.work / "tokenizer"
    if (arguments.resume or arguments.export_only) and saved.is_dir():
        return PreTrainedTokenizerFast.from_pretrained(saved)
    start = arguments.start
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start) if start else train_tokenizer(arguments.seed)
    if is_main():
        tokenizer.save_pretrained(saved, save_jinja_files=False)
    return tokenizer


def main() -> None:
    arguments = parse_arguments()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.source.world > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(arguments.seed)
    AttentionInterface.register("packed", packed_attention)
    tokenizer = the_tokenizer(arguments)
    if arguments.start:
        model = Qwen3ForCausalLM.from_pretrained(arguments.start, dtype=torch.float32)
    else:
        model = new_model(tokenizer, arguments.layers, arguments.width)
    model.set_attn_implementation("packed")
    if not arguments.export_only:
        train(arguments, tokenizer, model)
    if not is_main():
        return
    if arguments.output:
        state = torch.load(arguments.work / "checkpoint.pt", weights_only=True)
        export(model, state["average"], tokenizer, arguments.output)
        progress = Progress(**state["progress"])
        record = {"made": how_it_was_made(arguments, progress), **vars(progress)}
        (arguments.output / "training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
        print(f"wrote {arguments.output} at step {state['progress']['step']}")


if __name__ == "__main__":
    main()
