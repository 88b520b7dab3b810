"""The keys of a DeepSpeed configuration that mean the same here as in DeepSpeed (0.19).

What is not listed is refused: keys that DeepSpeed has removed, keys that would take over what the recipe or the loop
decides (data_efficiency, tensor_parallel, pipeline, hybrid_engine, autotuning, expert_parallel, zenflow), and misspelt
ones, which DeepSpeed ignores without a word at the top level.
"""

from __future__ import annotations

TOP_LEVEL = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
        "bf16",
        "fp16",
        "torch_autocast",
        "data_types",
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
        "activation_checkpointing",
        "aio",
        "checkpoint",
        "comet",
        "comms_logger",
        "compile",
        "csv_monitor",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "flops_profiler",
        "log_level",
        "memory_breakdown",
        "steps_per_print",
        "tensorboard",
        "timers",
        "wall_clock_breakdown",
        "wandb",
    }
)

ZERO = frozenset(
    {
        "stage",
        "allgather_bucket_size",
        "allgather_partitions",
        "contiguous_gradients",
        "compute_grad_norm",
        "enable_sanity_checks",
        "ignore_unused_parameters",
        "leaf_module",
        "load_from_fp32_weights",
        "log_trace_cache_warnings",
        "memory_efficient_linear",
        "offload_optimizer",
        "offload_param",
        "overlap_comm",
        "override_module_apply",
        "parameter_alignment",
        "pipeline_loading_checkpoint",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "stage3_allgather_sequential",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
        "stage3_use_all_reduce_for_fetch_params",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
        "zero_hpz_partition_size",
        "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_weights",
    }
)

DEEPSPEED_AUTO = frozenset({"data_types.keep_in_fp32_modules"})
"""Paths at which DeepSpeed itself knows the word "auto"."""
