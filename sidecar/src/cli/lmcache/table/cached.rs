//! Keys of what is cached, and when a hit is used.

use super::super::convert;
use super::super::keys::Form::{Any, Flag, Number, Numbers, Text, Texts, Whole};
use super::super::keys::Outcome::{Automatic, NotSupported, Translated};
use super::super::keys::{Row, key, older};
use super::row;

pub const CACHED: &[Row] = &[
    row(
        &[
            key("chunk_size", Whole),
            key("spec.server.chunkSize", Whole),
        ],
        Translated {
            to: &["cache.chunkTokens"],
            note: "Rounded up to whole blocks of vLLM.",
            by: convert::chunk_tokens,
        },
    ),
    row(
        &[key("save_decode_cache", Flag)],
        Translated {
            to: &["cache.save"],
            note: "true is PromptAndDecode.",
            by: convert::save,
        },
    ),
    row(
        &[key("min_retrieve_tokens", Whole)],
        Translated {
            to: &["cache.minLoadTokens"],
            note: "Without the key kvcachepool's default of 512 holds.",
            by: convert::min_load_tokens,
        },
    ),
    row(
        &[key("blocking_timeout_secs", Whole)],
        Translated {
            to: &["cache.loadTimeout"],
            note: "The longest wait of a request for a load.",
            by: convert::load_timeout,
        },
    ),
    row(
        &[key("save_unfull_chunk", Flag)],
        Automatic("The end of a prompt is always stored, in whole blocks of vLLM."),
    ),
    row(
        &[key("extra_config.save_chunk_meta", Flag)],
        Automatic("Every object describes itself."),
    ),
    row(
        &[
            key("pre_caching_hash_algorithm", Text),
            key("spec.server.hashAlgorithm", Text),
        ],
        Automatic("vLLM's own block hashes are used."),
    ),
    row(
        &[
            key("enable_async_loading", Flag),
            key("lookup_timeout_ms", Whole),
            key("external_lookup_client", Text),
            key("lookup_server_worker_ids", Numbers),
            key("enable_scheduler_bypass_lookup", Flag),
            key("hit_miss_ratio", Number),
            key("extra_config.lookup_backoff_time", Number),
            key(
                "extra_config.create_lookup_server_only_on_worker_0_for_mla",
                Flag,
            ),
            key("extra_config.use_exists_sync", Flag),
            key("extra_config.force_store_wait", Flag),
            key("LMCACHE_OFFLOAD_RPC_PORT", Any),
        ],
        Automatic("vLLM's scheduler asks its sidecar, and no step waits for a load."),
    ),
    row(
        &[
            key("extra_config.remote_enable_mla_worker_id_as0", Flag),
            key("extra_config.save_only_first_rank", Flag),
        ],
        Automatic("Ranks with the same KV share one copy of it."),
    ),
    row(
        &[key("use_layerwise", Flag)],
        NotSupported("A load ends before its request runs."),
    ),
    row(
        &[
            key("enable_blending", Flag),
            older("blend_recompute_ratio", Number, "blend_recompute_ratios"),
            key("blend_recompute_ratios", Numbers),
            key("blend_thresholds", Numbers),
            key("blend_check_layers", Numbers),
            key("blend_min_tokens", Whole),
            key("blend_special_str", Text),
            key("extra_config.enable_sparse", Flag),
        ],
        NotSupported("Only prefixes are reused."),
    ),
    row(
        &[key("extra_config.tag_keys", Texts)],
        NotSupported("Requests name their tags: `kvcachepool.tags` in `kv_transfer_params`."),
    ),
    row(
        &[key("LMCACHE_FORCE_SKIP_SAVE", Text)],
        Translated {
            to: &["cache.save"],
            note: "Every text but the empty one is None: requests only load.",
            by: convert::skip_save,
        },
    ),
    row(
        &[key("priority_limit", Whole)],
        NotSupported("Requests choose: `kvcachepool.store` in `kv_transfer_params`."),
    ),
    row(
        &[
            key("enable_hidden_state_cache", Flag),
            key("max_hidden_state_cpu_size", Number),
            key("hidden_state_layers", Numbers),
            key("hidden_states_retrieve_mode", Text),
            key("LMCACHE_EC_*", Any),
            key("ec_*", Any),
            key("ec.*", Any),
        ],
        NotSupported("Only KV is cached."),
    ),
];
