"""The configuration of a SambaY model, as transformers keeps one."""

from diffquant.model.config import ArchitectureConfig
from diffquant.model.sambay.architecture import SambaYArchitecture


class SambaYConfig(ArchitectureConfig, architecture=SambaYArchitecture):
    """The fields by the names that Phi-4-mini-flash-reasoning's config.json has for them."""

    model_type = "phi4flash"
