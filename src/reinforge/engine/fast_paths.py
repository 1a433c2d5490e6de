"""The fast paths of the engine, and the one switch that turns all of them off: `finetuning.policy.fast_paths`.

A fast path computes what a general path computes, in less time. With `fast_paths: false` only the general path is left:
transformers' modules with their sdpa attention, plain Python functions, torch's own number of threads. It serves every
family, and log-probs agree to 1e-5 either way: the parity tests run with both. Turn the switch off to find out whether
a fast path causes a problem.

A fast path that does not apply (another family, a dtype, a device) is left out without the switch, too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class FastPaths:
    """Which fast paths are on; chosen when a model is loaded."""

    decode: bool = True
    """`sampling/fast_llama.py`: one function over the weights of Llama-like models computes decode steps and short
    prompts; on a GPU, `decode_graphs.py` records the steps. Off: transformers' modules compute them."""

    attention: bool = True
    """`model/attention.py`, `model/flash_attention.py`: attention for grouped heads, for few keys, and for whole rows
    with shared prefixes. Off: transformers' sdpa, and each row copies the keys and values of its shared prefix."""

    torchscript: bool = True
    """`sampling/torchscript.py`: functions of many small operations run without Python's lock. Off: plain Python."""

    threads: bool = True
    """`sampling/threads.py`: sampling leaves a core to agents that keep one busy. Off: a fixed thread count."""

    last_mlp: bool = True
    """`model/last_mlp.py`: the last layer's MLP runs only for tokens whose features are needed. Off: for all tokens."""

    fused_layers: bool = True
    """`model/fused_layers.py`: linear layers with LoRA, norms and gated MLPs keep their inputs only and have one
    backward formula each. Off: automatic differentiation of transformers' and PEFT's own layers."""

    products: bool = True
    """`model/products.py`: float32 layers multiply by oneDNN where it is faster than MKL, as on AMD's processors with
    AVX-512, unless deterministic. Off: torch's own choice."""

    garbage_collection: bool = True
    """`garbage_collection.py`: Python collects garbage less often during a run. Off: Python's own thresholds."""

    serving: bool = False
    """Only where nothing is trained, since log-probs differ: float16 copies of weights (`sampling/projection.py`), and
    several tokens of a reply in one step (`sampling/guessing_sampler.py`)."""

    @classmethod
    def switch(cls, enabled: bool) -> FastPaths:
        return cls(**{field.name: enabled for field in fields(cls) if field.name != "serving"})
