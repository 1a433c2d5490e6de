"""What the algorithms share: which nodes they train on, and per-token numbers as lists and as padded tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from reinforge.errors import ConfigError, EngineError, Problem
from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.sampler import Graph, Node
from reinforge.redteam.core.system import System, check_same_tokens


def unpad_row(values_BT: Tensor, mask_BT: Tensor, row: int) -> list[float]:
    """Returns the numbers of one row without its padding.

    Example: values [0, -1, -2, 0], mask [0, 1, 1, 0] -> [-1, -2].
    """
    return values_BT[row][mask_BT[row]].tolist()


def find_begin(mask_BT: Tensor, row: int) -> int:
    return int(mask_BT[row].long().argmax())


def pad_rows(rows: Sequence[Sequence[float]], begins: Sequence[int], mask_BT: Tensor, like_BT: Tensor) -> Tensor:
    """Returns lists as one tensor `[B, T]`: each list begins at the first token of its row, and the rest is 0.

    Example: [[-1, -2], [-3]] with mask [[0, 1, 1], [1, 0, 0]] -> [[0, -1, -2], [-3, 0, 0]].

    Args:
        rows: One list for each row, recorded when its probe was sampled.
        begins: The column at which each list began then. It counts where the row has another number of tokens now,
            which is so if the probability of a first or last token has become exactly 1.
        mask_BT: True where a row has a token now.
        like_BT: Gives dtype and device.
    """
    padded_BT = torch.zeros(mask_BT.shape, dtype=like_BT.dtype, device=like_BT.device)
    counts = mask_BT.sum(dim=1).tolist()
    for i, (row, begin) in enumerate(zip(rows, begins, strict=True)):
        first = find_begin(mask_BT, i) if counts[i] == len(row) else begin
        if first + len(row) > mask_BT.shape[1]:
            raise EngineError(
                f"a probe had {len(row)} tokens from column {begin} on when it was sampled, but now its row has "
                f"{counts[i]} tokens in {mask_BT.shape[1]} columns; return the same tokens of a probe every time"
            )
        padded_BT[i, first : first + len(row)] = padded_BT.new_tensor(list(row))
    return padded_BT


def find_trainable(nodes: Iterable[Node[StateT, ActionT]]) -> list[Node[StateT, ActionT]]:
    """Returns the nodes whose probes have tokens.

    An empty text has none unless it carries them, as a `GeneratedText` that is only the end token does. It has no
    log-prob to train, and the perplexity that the others pay for is missing from its reward.
    """

    def is_empty(probe: object) -> bool:
        return isinstance(probe, str) and not probe and getattr(probe, "tokens", None) is None

    return [node for node in nodes if not is_empty(node.probe)]


def get_penalty_baseline(
    system: System[StateT, ActionT],
    kl_coef: float,
    context: Sequence[StateT],
    probes: Sequence[ActionT],
    logprobs: Tensor,
) -> Tensor | None:
    """Returns the baseline's log-probs of the tester's tokens; None without a KL penalty: it is not called then."""
    if not kl_coef:
        return None
    return check_same_tokens(system._get_baseline_logprobs_and_validate(context, probes), logprobs)


def refuse_single_children(graph: Graph[Any, Any], name: str) -> None:
    if graph.children and all(len(group) < 2 for group in graph.sibling_groups()):
        message = f"{name} compares siblings, but every point of this tree has one child"
        raise ConfigError(Problem("tree_width", message, "set it to 2 or more, or use PPO, which needs no siblings"))
