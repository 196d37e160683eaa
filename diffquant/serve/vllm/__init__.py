"""The plugin by which vLLM serves the family on its own layers; vLLM finds it by its entry point.

Importing it imports neither torch nor vLLM: `register` does, in each process of vLLM, where both are loaded already.
"""

import logging

from diffquant.serve.vllm.versions import note_untested


def register() -> None:
    """Make vLLM know the family's configurations and models, and, on a processor, packed weights of every width.

    vLLM calls it once or more in each of its processes.
    """
    from vllm import ModelRegistry

    from diffquant.serve.vllm.config import register_configs
    from diffquant.serve.vllm.unpacked import register_kernel

    note_untested(logging.getLogger("vllm.diffquant"))
    register_configs()
    register_kernel()
    # By its name, so that the model is imported where one is built, and not in the process that takes requests.
    if "DiffForCausalLM" not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model("DiffForCausalLM", "diffquant.serve.vllm.model:DiffForCausalLM")
