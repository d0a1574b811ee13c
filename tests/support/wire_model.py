"""A model as the wire sees it: what it declares, without weights."""

from engine.types import FeatureInfo, ModelInfo, Reuse, Task

INFO = ModelInfo(
    name="m", weights_version="7", dtype="float32", tasks=(Task.RANK, Task.RETRIEVE),
    score_names=("click",), context_features=("country", "age"),
    features=(
        FeatureInfo(name="item", dtype="int64", dim=0, on_history=True, on_candidates=True),
        FeatureInfo(name="action", dtype="int64", dim=0, on_history=True, on_candidates=False),
        FeatureInfo(name="mood", dtype="float32", dim=2, on_history=True, on_candidates=True),
    ),
    reads_query_time=False, embedding_dim=4, max_history_events=10, max_history_tokens=20,
    max_batch_tokens=64, keep_stride=1, reuse=Reuse.APPEND, reuse_reason="causal",
    backend="torch", exactness="bitwise", cache_tiers="tiered", page_size=8, chunk_size=32,
    token_bytes=512, sample_items=(3, 1),
)  # fmt: skip
