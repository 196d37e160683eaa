"""transformers configurations with the fields of an architecture."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from diffquant.family.spec import DiffSpec, read_spec
from diffquant.model.architecture import DEFAULTS, Architecture, TransformerArchitecture


class ArchitectureConfig(PreTrainedConfig):
    """transformers configuration with the fields of an architecture, and `spec`, its `DiffSpec` as plain data.

    A subclass states its architecture: `class SambaYConfig(ArchitectureConfig, architecture=SambaYArchitecture)`.
    """

    architecture_class: ClassVar[type[Architecture]]
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    use_cache: bool = True
    spec: dict[str, Any] | None = None

    def __init_subclass__(
        cls, architecture: type[Architecture], defaults: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        cls.architecture_class = architecture
        own = [field.name for field in fields(architecture) if field.name != "diff_spec"]
        cls.__annotations__ = dict.fromkeys(own, Any)
        for name in own:
            setattr(cls, name, (defaults or {}).get(name))
        # transformers turns the class attributes defined so far into dataclass fields.
        super().__init_subclass__(**kwargs)

    @property
    def architecture(self) -> Any:
        """The architecture, an instance of `architecture_class`.

        Raises:
            CheckpointError: `spec` is missing or contradicts itself.
        """
        own = {field.name: getattr(self, field.name) for field in fields(self.architecture_class)}
        own["num_key_value_heads"] = own["num_key_value_heads"] or own["num_attention_heads"]
        own["head_dim"] = own["head_dim"] or own["diff_spec"].head_dim
        return self.architecture_class(**own)

    @property
    def diff_spec(self) -> DiffSpec:
        """The attention's specification.

        Raises:
            CheckpointError: the specification is missing or contradicts itself.
        """
        return read_spec(self.spec)


class DiffTransformerConfig(ArchitectureConfig, architecture=TransformerArchitecture, defaults=DEFAULTS):
    """Configuration of a `DiffTransformer`."""

    model_type = "diff_transformer"
