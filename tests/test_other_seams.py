"""The seams of DeepSpeed, PEFT, transformers, vLLM and TRL's classes for it. One of these failing names what moved."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration


# Seam: module, what is looked at in it, and the text that must stand there.
PROMISES = {
    # tests/conftest.py
    "vLLM looks at a class of models by a function that tests replace": (
        "vllm.model_executor.models.registry",
        "_LazyRegisteredModel.inspect_model_cls",
        "mi = _run_in_subprocess(",
    ),
    # trainer.py
    "accelerate tells the epoch to a sampler two levels down": (
        "accelerate.data_loader",
        "DataLoaderShard.set_epoch",
        "self.batch_sampler.batch_sampler.sampler.set_epoch(epoch)",
    ),
    # lora/members.py
    "ZeRO 1 and 2 map a parameter to its master": (
        "deepspeed.utils.mixed_precision_linkage",
        "link_hp_params",
        "lp_param._hp_mapping = get_hp_fragment_mapping(",
    ),
    "the mapping gives the gradient's fragment in place": (
        "deepspeed.utils.tensor_fragment",
        "get_full_hp_grad",
        "self._hp_mapping.get_lp_grad_fragment(self._index_in_param_group)",
    ),
    "ZeRO 1 and 2 name their groups": (
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer.__init__",
        "self.bit16_groups = []",
    ),
    "ZeRO 1 and 2 name their flat masters": (
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer.__init__",
        "self.single_partition_of_fp32_groups = []",
    ),
    "ZeRO 1 and 2 clip by an attribute": (
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer.__init__",
        "self.clip_grad = clip_grad",
    ),
    "ZeRO 3 names its groups": (
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3.__init__",
        "self.fp16_groups = []",
    ),
    "ZeRO 3 names its flat masters": (
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3.__init__",
        "self.fp32_partitioned_groups_flat = []",
    ),
    "ZeRO 3 says to which group a part belongs": (
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3.__init__",
        "self.sub_group_to_group_id = {}",
    ),
    "ZeRO 3 clips by an attribute": (
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3.__init__",
        "self.clip_grad = clip_grad",
    ),
    "ZeRO 3 marks a parameter with its optimizer": (
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "p._z3_optimizer = self",
    ),
    "ZeRO 3 keeps small parameters whole": (
        "deepspeed.runtime.zero.parameter_offload",
        "DeepSpeedZeRoOffload",
        "param.ds_persist = True",
    ),
    "accelerate lets DeepSpeed step inside the backward": (
        "accelerate.utils.deepspeed",
        "DeepSpeedEngineWrapper.backward",
        "self.engine.step()",
    ),
    # lora/layers.py
    "4-bit layers are packed anew for a CPU unless an attribute says no": (
        "bitsandbytes.nn",
        "Linear4bit.forward",
        "and self.support_avx512bf16_for_cpu",
    ),
    # run/checkpoint.py, trainer.py
    "the loss since the last log is one attribute": (
        "transformers.trainer",
        "Trainer",
        "self._tr_loss = torch.tensor(0.0",
    ),
    "and the step of that log another": (
        "transformers.trainer",
        "Trainer",
        'logs["loss"] = tr_loss_scalar / (self.state.global_step - self._globalstep_last_logged)',
    ),
    "the device of the arguments is cached": (
        "transformers.training_args",
        "TrainingArguments",
        "self._setup_devices",
    ),
    # generate/vllm.py
    "TRL's engine is built by name": (
        "trl.generation.vllm_generation",
        "VLLMGeneration._init_vllm",
        "self.llm = LLM(",
    ),
    "TRL's client is built by name": (
        "trl.generation.vllm_generation",
        "VLLMGeneration._init_vllm",
        "self.vllm_client = VLLMClient(",
    ),
    "TRL remembers that the weights sleep": (
        "trl.generation.vllm_generation",
        "VLLMGeneration.generate",
        "self._llm_weights_sleeping",
    ),
    "vLLM keeps slots for the packed module of one that is named": (
        "vllm.lora.utils",
        "is_in_target_modules",
        "packed_children = packed_modules_mapping.get(module_suffix)",
    ),
    "CUDA graphs without adapters can be left out": (
        "vllm.v1.cudagraph_dispatcher",
        "CudagraphDispatcher._get_lora_cases",
        "self.compilation_config.cudagraph_specialize_lora",
    ),
    # generate/engine.py
    "vLLM's model names its LoRA manager": (
        "vllm.lora.model_manager",
        "LoRAModelManager.__init__",
        "self.model.lora_manager = self",
    ),
    "the engine runs a function on its model": (
        "vllm.v1.worker.worker_base",
        "WorkerBase.apply_model",
        "return fn(self.get_model())",
    ),
    "an adapter's slot is its place in a list": (
        "vllm.lora.model_manager",
        "LoRAModelManager.activate_adapter",
        "self.lora_index_to_id[index] = lora_model.id",
    ),
    "vLLM takes no slot of a pinned adapter": (
        "vllm.utils.cache",
        "LRUCache.popitem",
        "(key for key in self.order if key not in self.pinned_items)",
    ),
    "and removing such an adapter unpins it": ("vllm.utils.cache", "LRUCache.__delitem__", "self._unpin(key)"),
    "vLLM's LoRA manager knows where its slots lie": (
        "vllm.lora.model_manager",
        "LoRAModelManager.__init__",
        "self.device = device",
    ),
    "a layer's kernels read stacks of all slots": (
        "vllm.lora.layers.base_linear",
        "BaseLinearLayerWithLoRA.set_lora",
        "self.lora_a_stacked[0][index, 0,",
    ),
    "the engine counts as running what it has the state of": (
        "vllm.v1.engine.output_processor",
        "OutputProcessor.get_num_unfinished_requests",
        "return len(self.request_states)",
    ),
    "the client asks with a session": ("trl.generation.vllm_client", "VLLMClient.__init__", "requests.Session()"),
    "the client names the adapter as the model": ("trl.generation.vllm_client", "VLLMClient", '"model": self.model'),
}

# Seam: its parameters, `self` first.
METHODS = {
    (LoraConfig, "_register_custom_module"): "self mapping",
    (LoraLayer, "update_layer"): "self adapter_name r lora_alpha config kwargs",
    (LoraLayer, "set_adapter"): "self adapter_names inference_mode",
    (VLLMGeneration, "_init_vllm"): "self",
    (VLLMGeneration, "sync_weights"): "self",
    (VLLMGeneration, "generate"): "self prompts images num_generations profiler",
    (VLLMClient, "_get"): "self url kwargs",
    (VLLMClient, "_post"): "self url kwargs",
    (VLLMClient, "check_server"): "self total_timeout retry_interval",
    (VLLMClient, "get_server_info"): "self",
}


@pytest.mark.parametrize("seam", PROMISES)
def test_promise(seam):
    module, path, text = PROMISES[seam]
    if (package := module.partition(".")[0]) in ("deepspeed", "bitsandbytes", "vllm"):  # extras
        pytest.importorskip(package)
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert text in inspect.getsource(found), f"seam moved in {module}.{path}: {seam}"


@pytest.mark.parametrize(("owner", "name"), METHODS, ids=lambda value: getattr(value, "__name__", value))
def test_signature(owner, name):
    found = " ".join(inspect.signature(getattr(owner, name)).parameters)
    assert found == METHODS[owner, name], f"seam {owner.__name__}.{name} has parameters ({found})"


@pytest.mark.parametrize(
    ("module", "path", "parameters"),
    [
        (
            "vllm.lora.lora_model",
            "LoRAModel.from_lora_tensors",
            "lora_model_id tensors peft_helper device dtype model_vocab_size weights_mapper skip_prefixes",
        ),
        ("vllm.v1.engine.llm_engine", "LLMEngine.abort_request", "self request_ids internal"),
        ("vllm.lora.model_manager", "LRUCacheLoRAModelManager.add_adapter", "self lora"),
        ("vllm.lora.model_manager", "LRUCacheLoRAModelManager.activate_adapter", "self lora_id"),
        ("vllm.lora.model_manager", "LRUCacheLoRAModelManager.pin_adapter", "self lora_id"),
        ("vllm.lora.model_manager", "LoRAModelManager.get_adapter", "self adapter_id"),
        ("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA.set_lora", "self index lora_a lora_b"),
        ("vllm.model_executor.models.utils", "WeightsMapper.get_rename_mapper", "self"),
        ("vllm.model_executor.models.utils", "WeightsMapper.map_name", "self key"),
    ],
)
def test_signature_of_vllm(module, path, parameters):
    pytest.importorskip("vllm")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert " ".join(inspect.signature(found).parameters) == parameters, f"seam {module}.{path} has other parameters"


def test_the_private_gradient_of_zero_3_is_where_it_was():
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    found = inspect.signature(stage3.DeepSpeedZeroOptimizer_Stage3._get_fp32_grad_state_partition).parameters
    assert list(found) == ["self", "param", "release_swap_buffers"]


def test_the_active_adapter_is_an_attribute_that_peft_asks_for():
    assert "return self._active_adapter" in inspect.getsource(LoraLayer.active_adapter.fget)


@pytest.mark.parametrize("name", ["trl", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes"])
def test_what_is_installed_lies_in_a_window_with_an_upper_end(name):
    """A version that nobody tried is not installed; widening a window begins with this file."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    (wanted,) = {str(r) for r in map(Requirement, lines) if r.name == name}
    window = Requirement(wanted).specifier
    assert any(each.operator == "<" for each in window), f"{wanted} has no upper end"
    assert Version(version(name)) in window
