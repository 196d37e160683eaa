"""The transformers configuration of a SambaY model."""

from diffquant.model.config import ArchitectureConfig
from diffquant.model.sambay.architecture import SambaYArchitecture


class SambaYConfig(ArchitectureConfig, architecture=SambaYArchitecture):
    """Configuration of a SambaY model, with fields named as in Phi-4-mini-flash-reasoning's config.json."""

    model_type = "phi4flash"
