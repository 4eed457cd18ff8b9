"""vLLM's scheduler without the walk through its block tables for tokens that change nothing in them.

In every step the scheduler calls, in Python, allocate_slots() and cache_blocks() for every running request. Only a
token that opens or fills a KV block changes anything there, one in sixteen. With hundreds of short requests the device
waits for this walk, which is a third of the scheduling's time.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


def shorten_walk(llm: "LLM") -> bool:
    """From now on both calls return at once where they would change nothing; whatever else is asked goes to vLLM.

    False, with nothing changed, where the cache is not one group of blocks of full attention with prefix caching.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    if [type(group) for group in groups] != [FullAttentionManager] or not manager.enable_caching:
        return False
    size, held, cached = groups[0].block_size, groups[0].req_to_blocks, groups[0].num_cached_block
    if size != groups[0].block_pool.hash_block_size:
        return False
    allocate, cache = manager.allocate_slots, manager.cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, **others: Any) -> Any:
        if num_new_tokens == 1 and others == {"num_lookahead_tokens": 0}:  # of a running request
            name, end = request.request_id, request.num_computed_tokens + 1
            has_room = end <= len(held.get(name, ())) * size
            if has_room and cached.get(name, -1) >= min(end, request.num_tokens) // size:
                return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, **others)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if cached.get(request.request_id, -1) < num_computed_tokens // size:
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
    return True
