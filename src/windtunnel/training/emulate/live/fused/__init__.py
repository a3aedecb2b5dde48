"""Packages of fused kernels that CUDA machines have and this one has not, as stand-ins for what is public.

`MODULES` says what can be imported. A stand-in exists only in a rank's process and only where its package is
not installed. It has the package's signatures, writes its kernels down and keeps for the backward pass what
the real ones keep; what it does not have fails to import. Who wants a program to go without says so as in
Python: ``sys.modules["apex"] = None`` before its import. ``find_spec`` and ``importlib.metadata`` find them.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from windtunnel.base.importing import after_import
from windtunnel.training.emulate.live.fused import attention, kernel, layers
from windtunnel.training.emulate.live.names import refuse
from windtunnel.training.emulate.live.observe import Observer
from windtunnel.training.emulate.live.patches import replaces

VERSIONS = {
    "flash_attn": "2.8.3", "transformer_engine": "2.6.0", "apex": "0.1", "amp_C": "0.1",
    "fused_weight_gradient_mlp_cuda": "0.1", attention.FLASH_3: "3.0.0",
}  # fmt: skip
"""What each stands in for; ``amp_C`` and ``fused_weight_gradient_mlp_cuda`` are parts of Apex."""


def _of(holder: Any, names: str) -> dict[str, Any]:
    return {name: getattr(holder, name) for name in names.split()}


def _absent(module: str, names: str) -> dict[str, Any]:
    """Classes that programs name to derive from them or to ask for them; refused where one is made."""
    why = "what its kernels do is not known"
    return {
        name: type(name, (), {"__new__": refuse(f"{module}.{name}", why), "__module__": module})
        for name in names.split()
    }


TE = "transformer_engine.pytorch"
_LISTS = _of(kernel, "multi_tensor_scale multi_tensor_l2norm")
_NORMS = {**_of(layers, "FusedLayerNorm FusedRMSNorm"), **_of(kernel, "FusedLayerNormAffineFunction")}
_LAYERS = {
    **_of(layers, "Linear LayerNormLinear LayerNorm RMSNorm"),
    **_absent(TE, "GroupedLinear LayerNormMLP TransformerLayer fp8_model_init"),
}
_FP8 = {"fp8_model_init": _LAYERS["fp8_model_init"], **_of(kernel, "FP8GlobalStateManager fp8_autocast")}
_ADAM = _of(kernel, "FusedAdam FusedSGD")
MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": attention.FLASH,
    "flash_attn.flash_attn_interface": attention.FLASH,
    attention.FLASH_3: attention.HOPPER,
    "flash_attn.bert_padding": _of(attention, "unpad_input pad_input"),
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": _of(attention, "apply_rotary_emb"),
    "apex": {},
    "apex.normalization": _NORMS,
    "apex.normalization.fused_layer_norm": _NORMS,
    "apex.multi_tensor_apply": _of(kernel, "multi_tensor_applier"),
    "apex.optimizers": _ADAM,
    "amp_C": _LISTS,
    "fused_weight_gradient_mlp_cuda": _of(kernel, "wgrad_gemm_accum_fp32 wgrad_gemm_accum_fp16"),
    "transformer_engine": {},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {
        **kernel.RECIPES, **_of(kernel, "Format"), "Recipe": kernel.ScalingRecipe
    },
    TE: {
        **_LAYERS, **_of(attention, "DotProductAttention"), **_of(kernel, "fp8_autocast"),
        **_of(kernel, "checkpoint activation_recompute_forward"),
    },
    f"{TE}.attention": _of(attention, "DotProductAttention"),
    f"{TE}.attention.rope": _of(attention, "apply_rotary_pos_emb"),
    f"{TE}.distributed": {
        **_absent(f"{TE}.distributed", "CudaRNGStatesTracker"),
        **_of(kernel, "checkpoint activation_recompute_forward"),
    },
    f"{TE}.fp8": _FP8,
    f"{TE}.module": _LAYERS,
    f"{TE}.module.base": _of(layers, "TransformerEngineBaseModule"),
    f"{TE}.ops": _absent(f"{TE}.ops", "Sequential FusibleOperation"),
    f"{TE}.optimizers": {**_ADAM, **_LISTS, **_of(kernel, "multi_tensor_applier")},
    f"{TE}.tensor": _absent(f"{TE}.tensor", "QuantizedTensor"),
}  # fmt: skip
"""What each module has."""


def install(observer: Observer) -> None:
    """Let the packages that are not installed be imported. Call once, before the script runs."""
    kernel.install(observer)
    missing = [package for package in VERSIONS if importlib.util.find_spec(package) is None]
    sys.meta_path.append(_Finder(missing))  # type: ignore[arg-type]
    after_import("kernels", _answer_hub)


def _answer_hub(kernels: Any) -> None:
    """Kernels that the package ``kernels`` loads from the Hub as they are compiled for the device:
    FlashAttention's are those of its own packages. Of others that cannot be loaded the report has a
    sentence, for scripts do without."""

    def package_of(repo_id: Any) -> str:
        match = re.search(r"flash-?att(?:n|ention)-?([23]?)$", str(repo_id))
        return "" if match is None else attention.FLASH_3 if match[1] == "3" else "flash_attn"

    @replaces(kernels)
    def has_kernel(original: Any, repo_id: Any, *args: Any, **options: Any) -> bool:
        return bool(package_of(repo_id)) or bool(original(repo_id, *args, **options))

    @replaces(kernels)
    def get_kernel(original: Any, repo_id: Any, *args: Any, **options: Any) -> Any:
        if package := package_of(repo_id):
            module = ModuleType(str(repo_id).rpartition("/")[2].replace("-", "_"))
            vars(module).update(MODULES[package], flash_attn_interface=SimpleNamespace(**MODULES[package]))
            return module
        try:
            return original(repo_id, *args, **options)
        except Exception:
            kernel.note(f"kernels.get_kernel: {repo_id} cannot be loaded here; the script did without it")
            raise


class _Finder:
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in MODULES or name.partition(".")[0] not in self.packages:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def find_distributions(self, context: Any) -> Iterator[Distribution]:
        name = None if context.name is None else context.name.replace("-", "_")
        return (_Installed(package) for package in self.packages if name in (None, package))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A package has its modules, too: ``import transformer_engine`` gives ``te.pytorch``."""
        name = module.__name__
        vars(module).update(MODULES[name], __version__=VERSIONS[name.partition(".")[0]])
        for inner in MODULES:
            if inner.rpartition(".")[0] == name:
                importlib.import_module(inner)


class _Installed(Distribution):
    """What ``importlib.metadata`` says of a package that stands in."""

    def __init__(self, package: str) -> None:
        self.package = package

    def read_text(self, filename: str) -> str | None:
        name, version = self.package.replace("_", "-"), VERSIONS[self.package]
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        return {"METADATA": metadata, "top_level.txt": self.package}.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(path)
