"""Native fp4 training without Transformer Engine: what it asks of a machine, and what Megatron is given.

What its modules then compute: scripts/contracts/te_fp4.py.
"""

import importlib
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.sections import Precision
from megatron_rl.engine.errors import UnsupportedModelError
from megatron_rl.engine.native_fp4 import Fp4Factory, native_fp4_settings

NATIVE = Precision(training="native", rollouts="nvfp4", activations="nvfp4")


def transformer_engine(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **recipes: object) -> None:
    package, common = ModuleType("transformer_engine"), ModuleType("transformer_engine.common")
    common.recipe = SimpleNamespace(**recipes)
    for module in (package, common):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_fp4_training_without_transformer_engine_is_no_silent_bf16() -> None:
    with pytest.raises(UnsupportedModelError, match="would train in bf16; install .* or use 'qat'"):
        native_fp4_settings(NATIVE, has_transformer_engine=False)
    assert native_fp4_settings(Precision(), has_transformer_engine=False) == {}


@pytest.mark.parametrize(
    ("capability", "recipes"), [((9, 0), {"CustomRecipe": object}), ((10, 0), {})], ids=["Hopper", "an old one"]
)
def test_fp4_training_needs_blackwell_and_custom_recipes(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], recipes: dict
) -> None:
    transformer_engine(monkeypatch, capability, **recipes)
    with pytest.raises(UnsupportedModelError, match=r"10.0 or above .*custom recipes \(2.20\); use 'qat'"):
        native_fp4_settings(NATIVE, has_transformer_engine=True)


@pytest.mark.parametrize("variable", ["NVTE_USE_FAST_MATH", "NVTE_NVFP4_4OVER6", "NVTE_BACKWARD_OVERRIDE"])
def test_the_environment_may_not_change_the_rounding(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    transformer_engine(monkeypatch, (10, 0), CustomRecipe=object)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(UnsupportedModelError, match=f"{variable} in the environment.*unset it"):
        native_fp4_settings(NATIVE, has_transformer_engine=True)


def test_the_settings_of_fp4_training_are_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer_engine(monkeypatch, (10, 0), CustomRecipe=object)
    settings = native_fp4_settings(NATIVE, has_transformer_engine=True)
    assert settings.keys() <= TransformerConfig.__dataclass_fields__.keys()
    assert (settings["fp4"], settings["fp4_recipe"]) == ("e2m1", "custom")


@pytest.mark.parametrize("amax", [256.0, 0.1, 6e4])
@pytest.mark.parametrize("backward", ["full", "nvfp4"])
def test_the_path_that_megatron_imports_is_the_factory(amax: float, backward: str) -> None:
    """As Megatron does: it imports what precedes the last dot, and takes the attribute after it."""
    factory = Fp4Factory(amax, backward)
    module, _, name = factory.path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert found == factory and callable(found)
    assert pickle.loads(pickle.dumps(found)) == factory


def test_any_other_name_is_no_factory() -> None:
    module = importlib.import_module("megatron_rl.engine.native_fp4")
    assert not hasattr(module, "amax_256_backward_full")
