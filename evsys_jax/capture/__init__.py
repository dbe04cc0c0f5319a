"""Captured model calls: the record, the durable store, and one verified chain per rollout.

Plain Python and numpy: importing this package loads neither jax nor tinker.
"""

from evsys_jax.capture.build import (
    CallSpan,
    RolloutBuild,
    build_rollout,
)
from evsys_jax.capture.builder import (
    BuildNotes,
    BuildOutput,
    Chain,
    ChainLink,
    prefix_merging,
    run_builder,
)
from evsys_jax.capture.config import (
    TokenIdCaptureConfig,
)
from evsys_jax.capture.conformance import (
    ConformanceError,
    run_conformance,
)
from evsys_jax.capture.consumer import (
    _assemble,
    _failed_build,
    _incomplete_masks,
    clear_token_captures_for_rollouts,
    logger,
    mask_incomplete_when_attributed_from_config,
    token_id_capture_dirs_from_config,
    trajectories_for_rollout,
    trajectories_from_source,
)
from evsys_jax.capture.fingerprint import (
    FINGERPRINT_VERSION,
    assistant_fingerprint,
    canonicalize_tool_arguments,
    conversation_digest,
)
from evsys_jax.capture.projection import (
    assert_prefix_contiguity,
    project_chain_to_output_items,
    project_main_chain_response,
)
from evsys_jax.capture.protocols import (
    TokenCaptureSnapshot,
    TokenSink,
    TokenSource,
)
from evsys_jax.capture.records import (
    DIGEST_VERSION,
    TOKEN_ENTRY_MIN_SCHEMA_VERSION,
    TOKEN_ENTRY_RECORD_SCHEMA_VERSION,
    TOKEN_FIELDS,
    ParentResolutionStatus,
    TokenEntry,
    compute_digest,
    cumulative_tokens,
    encode_token_ids,
    extract_token_fields,
    response_to_output_items,
    stamp_continuation,
    stamp_lineage,
    strip_token_fields,
)
from evsys_jax.capture.store import (
    TokenCaptureStore,
    make_token_store,
    validate_rollout_id,
)
from evsys_jax.capture.terminal import (
    TerminalAttribution,
    resolve_terminal,
)

__all__ = [
    "DIGEST_VERSION",
    "FINGERPRINT_VERSION",
    "TOKEN_ENTRY_MIN_SCHEMA_VERSION",
    "TOKEN_ENTRY_RECORD_SCHEMA_VERSION",
    "TOKEN_FIELDS",
    "BuildNotes",
    "BuildOutput",
    "CallSpan",
    "Chain",
    "ChainLink",
    "ConformanceError",
    "ParentResolutionStatus",
    "RolloutBuild",
    "TerminalAttribution",
    "TokenCaptureSnapshot",
    "TokenCaptureStore",
    "TokenEntry",
    "TokenIdCaptureConfig",
    "TokenSink",
    "TokenSource",
    "_assemble",
    "_failed_build",
    "_incomplete_masks",
    "assert_prefix_contiguity",
    "assistant_fingerprint",
    "build_rollout",
    "canonicalize_tool_arguments",
    "clear_token_captures_for_rollouts",
    "compute_digest",
    "conversation_digest",
    "cumulative_tokens",
    "encode_token_ids",
    "extract_token_fields",
    "logger",
    "make_token_store",
    "mask_incomplete_when_attributed_from_config",
    "prefix_merging",
    "project_chain_to_output_items",
    "project_main_chain_response",
    "resolve_terminal",
    "response_to_output_items",
    "run_builder",
    "run_conformance",
    "stamp_continuation",
    "stamp_lineage",
    "strip_token_fields",
    "token_id_capture_dirs_from_config",
    "trajectories_for_rollout",
    "trajectories_from_source",
    "validate_rollout_id",
]
