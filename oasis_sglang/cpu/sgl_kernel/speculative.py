"""Draft trees: build them, read them back from a mask, verify them greedily.

A request's tree has ``n`` nodes; node 0 is the last committed token. SGLang describes it by links
``retrive_next_token`` (a node's first child) and ``retrive_next_sibling``, int64 ``[b, n]`` with -1
for none, and by an ancestor mask in which row ``i`` marks the nodes that node ``i`` may attend to.
Also importable as ``sgl_kernel.speculative``, as in the wheel.
"""

import torch

FULL_MASK, QLEN_ONLY = 0, 1  # sglang's TreeMaskMode


def _links(parent):
    """First child and next sibling of every node. parent: int64 ``[b, n]``, -1 for none."""
    n = parent.shape[1]
    node = torch.arange(n)
    none = torch.full((), n)

    def smallest(candidates):  # bool [b, n, n], over the last dimension
        found = torch.where(candidates, node, none).amin(-1)
        return torch.where(found == n, -1, found)

    child = smallest(parent[:, None, :] == node[:, None])
    siblings = (parent[:, None, :] == parent[:, :, None]) & (node > node[:, None])
    return child, smallest(siblings & (parent >= 0)[:, :, None])


def _parents(parent_list, selected_index, topk):
    """Parent node of each of the ``n`` nodes, int64 ``[b, n]``.

    Candidate ``c`` hangs below slot ``c // topk``; slot 0 is the root, slot ``s`` the candidate
    ``parent_list[s]``. Node ``i`` is the ``i - 1``-th selected candidate. A candidate whose parent
    was not selected gets -1, as does the root.
    """
    selected = selected_index.to(torch.int64)
    slot = selected // topk
    if parent_list.numel():
        last = parent_list.shape[1] - 1
        candidate = parent_list.to(torch.int64).gather(1, slot.clamp(max=last))
        matches = candidate[:, :, None] == selected[:, None, :]
        node = torch.where(matches.any(-1), matches.int().argmax(-1) + 1, -1)
    else:  # a tree of depth one
        node = torch.full_like(slot, -1)
    root = torch.full((selected.shape[0], 1), -1)
    return torch.cat([root, torch.where(slot == 0, 0, node)], 1)


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """Write links, positions and ancestor mask of the trees that EAGLE's drafting selected.

    parent_list int64 ``[b, *]``; selected_index int64 ``[b, n - 1]``; verified_seq_len ``[b]``.
    tree_mask (flat) holds per request ``n`` rows of ``n`` columns (QLEN_ONLY) or of
    ``seq_len + n`` columns (FULL_MASK), of which only the last ``n`` are written.
    """
    n = int(draft_token_num)
    if int(tree_mask_mode) not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError("bit-packed tree masks have no CPU stand-in")
    parent = _parents(parent_list, selected_index[:, : n - 1], topk)
    b = parent.shape[0]

    mask = torch.zeros(b, n, n, dtype=torch.bool)
    mask[:, :, 0] = True
    level = torch.zeros(b, n, dtype=torch.int64)
    node = torch.arange(n).expand(b, n)
    for _ in range(int(depth)):  # climb from all nodes at once
        below_root = node > 0
        mask |= torch.nn.functional.one_hot(node.clamp(min=0), n).bool()
        level += below_root
        node = torch.where(below_root, parent.gather(1, node.clamp(min=0)), 0)

    child, sibling = _links(parent)
    retrive_next_token.copy_(child)
    retrive_next_sibling.copy_(sibling)
    retrive_index.copy_(torch.arange(b * n).view(b, n))
    positions.view(-1)[: b * n] = (verified_seq_len[:, None] + level).view(-1).to(positions.dtype)
    if int(tree_mask_mode) == QLEN_ONLY:
        tree_mask.view(-1)[: b * n * n] = mask.view(-1).to(tree_mask.dtype)
        return
    start = 0
    for request, seq_len in enumerate(verified_seq_len.tolist()):
        width = seq_len + n
        block = tree_mask.view(-1)[start : start + n * width].view(n, width)
        block[:, seq_len:] = mask[request].to(tree_mask.dtype)
        start += n * width


def reconstruct_indices_from_tree_mask(
    tree_mask,
    verified_seq_len,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    batch_size,
    draft_token_num,
):
    """Write positions and links of trees given by their ancestor mask, flat ``[b * n * n]``.

    Ancestors precede descendants, so a node's parent is its largest strict ancestor.
    """
    b, n = int(batch_size), int(draft_token_num)
    ancestors = tree_mask.view(-1)[: b * n * n].view(b, n, n).bool().tril(-1)
    parent = torch.where(ancestors, torch.arange(n), -1).amax(-1)
    child, sibling = _links(parent)
    depth = ancestors.sum(-1)
    positions.view(-1)[: b * n] = (verified_seq_len[:b, None] + depth).view(-1).to(positions.dtype)
    retrive_index.copy_(torch.arange(b * n).view(b, n))
    retrive_next_token.copy_(child)
    retrive_next_sibling.copy_(sibling)


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Follow the target's argmax down each tree; accept the drafted nodes that agree.

    candidates and target_predict: token ids ``[b, n]``. Writes, per request: the flat indices of
    the root and the accepted nodes to ``accept_index`` ``[b, steps + 1]``, the number of accepted
    drafts to ``accept_token_num`` ``[b]``, and the target's token after each of those nodes to
    ``predicts`` (flat), the last one being the bonus token.
    """
    target = target_predict.reshape(-1).tolist()
    drafted, flat = candidates.tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for request in range(len(drafted)):
        path = [0]
        while len(path) < accept_index.shape[1]:
            wanted = target[flat[request][path[-1]]]
            node = child[request][path[-1]]
            while node != -1 and drafted[request][node] != wanted:
                node = sibling[request][node]
            if node == -1:
                break
            path.append(node)
        indices = [flat[request][node] for node in path]
        accept_index[request, : len(path)] = torch.tensor(indices, dtype=accept_index.dtype)
        accept_token_num[request] = len(path) - 1
        for index in indices:
            predicts[index] = target[index]
