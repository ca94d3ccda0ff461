"""Every default, once. A recipe is this file with the values of its parts and its own delta laid over it."""

model = dict(
    # The weights to start from: a folder, or an id on the Hugging Face hub.
    path=None,
    # A branch, tag or commit of a hub id. None: the newest.
    revision=None,
    # A name (tuner list), a path to a .jinja file, or the template itself. None: the tokenizer's own.
    chat_template=None,
    # 'sdpa', 'eager', 'flash_attention_2' ... None: transformers' choice. 'auto': flash attention where the GPUs, the
    # installed packages, the compute type and the model have it, else None.
    attn_implementation="auto",
    # Liger's fused kernels for norms, rotary embeddings and MLPs. 'auto': where there are GPUs and liger-kernel.
    use_liger_kernel="auto",
    # Code that comes with a model runs only when this is True and `revision` is a full 40-digit commit.
    trust_remote_code=False,
    # True in the parts of models that transformers has not: they exist as code on the hub alone.
    remote_code=False,
    # Add rows to the embeddings where the tokenizer has more tokens than they have rows; False: that is refused.
    resize_embeddings=False,
    # A mixture of experts: the weight of the loss that keeps its router balanced. None: the model's own; 0: none.
    router_aux_loss_coef=None,
)

# What planning needs to know of the model, in the keys of its config.json. Another model.path needs others here;
# None: read them from model.path.
architecture = None

# dict(bits=4, quant_type='nf4', double_quant=True): the base model's weights in 4 bits. None: not quantized.
quantization = None

# dict(r=64, lora_alpha=16, lora_dropout=0.1, target_modules='all-linear', use_dora=False), in PEFT's names.
# init_lora_weights: True, 'gaussian', 'orthogonal', 'olora', 'pissa', 'pissa_niter_4'.
# path='runs/sft' goes on with that adapter, which brings its own r, lora_alpha and target_modules.
# None: every weight is trained.
adapter = None

# What is learned: 'sft' trains on the assistant's turns, 'pretrain' on every token of plain text; 'dpo', 'orpo' and
# 'reward' learn from pairs of answers, 'kto' from single ones marked good or bad. Their settings have TRL's names.
objective = dict(type="sft")

train_dataloader = dict(
    # Micro-batch: samples (packed rows, with packing) per process and forward pass. 'auto': the fastest that fits, at
    # the same global batch (docs/plan.md); what is learned stays.
    batch_size=1,
    # Processes that collate batches, beside each rank.
    num_workers=0,
    dataset=dict(
        # A .json, .jsonl, .csv, .txt, .parquet or .arrow file (text also as .gz, .zst or .bz2), a folder of them, a
        # pattern ('data/*.jsonl'), an id on the Hugging Face hub, or files there ('hf://datasets/OWNER/NAME/*.json').
        path=None,
        # A configuration of a hub data set, such as 'main'.
        name=None,
        # A split of the data set.
        split="train",
        # The shape of a row: docs/own-data.md lists them. None: detected from the columns.
        format=None,
        # A format's column -> this data set's: dict(prompt='question'), or a text of several: '{context}\n{question}'.
        columns=None,
        # A system turn for conversations that have none.
        system=None,
        # Several data sets instead of path: [dict(part='alpaca'), dict(path='my.jsonl', weight=2)]. weight 0.5 takes
        # half of a data set's rows, 2 takes each row twice.
        mixture=None,
        # Only the first rows, as many as this. None: all.
        max_rows=None,
        # This part of the rows (0.05) is held out of training and is the validation's. None: nothing.
        val_split=None,
        # Which rows those are. None: randomness.seed.
        val_seed=None,
        # True in val_dataloader alone: the rows that val_split holds out, not the others. Set by it.
        held_out=False,
        # So many bad rows (torn, not UTF-8, of another shape) are left out and listed; one more is an error.
        bad_rows=0,
        # Tokens. A longer sample is split when packing, else cut at the end (and counted).
        max_length=2048,
        # Fill rows of max_length with whole samples, best fit first; samples never attend to each other.
        packing=True,
        # Processes that make tokens of rows; the result is the same with any number. 'auto': one for each core that the
        # process may use, and no other one for a few thousand rows.
        num_proc="auto",
        # The thinking of answers: 'strip' it, keep that of the 'last' answer alone, or 'keep' all of it and refuse rows
        # that the chat template would take it from. None: as the template does; what it changes is counted.
        thinking=None,
    ),
)

# The same shape as train_dataloader. None: no validation.
val_dataloader = None

optim_wrapper = dict(
    optimizer=dict(
        # A class of torch.optim, bitsandbytes or DeepSpeed: docs/deepspeed.md lists them.
        type="AdamW",
        # The learning rate at its highest, per optimizer step.
        lr=2e-5,
        # Adam's decay rates of the two moments.
        betas=(0.9, 0.999),
        # Added to the denominator of Adam's update.
        eps=1e-8,
        # Decoupled from the gradient, as in torch's AdamW.
        weight_decay=0.0,
        # The learning rate of the matrices that Muon trains; lr is then that of the other weights. None: lr for all.
        muon_lr=None,
        # LoRA+: the learning rate of an adapter's B matrices as a multiple of that of its A matrices. None: the same.
        loraplus_lr_ratio=None,
    ),
    # The gradient's 2-norm is clipped to this. None: not clipped.
    clip_grad=dict(max_norm=1.0),
    # Micro-batches per optimizer step. Global batch = batch_size x accumulative_counts x processes. 'auto': what
    # batch_size leaves of the global batch.
    accumulative_counts=16,
    # 'bf16', 'fp16', 'fp32'. 'auto': bf16 where every GPU has compute capability 8.0 or more, else fp16; fp32 on a CPU.
    dtype="auto",
)

param_scheduler = dict(
    # The learning rate's course: 'cosine', 'linear', 'constant', 'cosine_with_restarts', 'polynomial', 'inverse_sqrt'.
    type="cosine",
    # The part of all steps over which the rate rises. The first of w such steps has 1/w of the rate, not 0.
    warmup_ratio=0.03,
)

train_cfg = dict(
    # Times that each row is trained on.
    max_epochs=3,
    # Optimizer steps. A number here wins over max_epochs. None: max_epochs decides.
    max_steps=None,
    # Optimizer steps between validations. None: at the end of each epoch.
    val_interval=None,
    # Training ends after so many validations without a lower loss. None: never before its time.
    early_stopping_patience=None,
    # Train the last so many decoder layers alone and freeze the rest. None: all.
    trainable_layers=None,
    # Samples per optimizer step over all processes. None: what batch_size and accumulative_counts give, of which
    # 'auto' counts as 1 and as 16.
    global_batch_size=None,
    # Recompute activations in the backward pass: less memory, about a third more time. 'auto': only where it must be.
    gradient_checkpointing=True,
    # How sft, pretrain, dpo and kto compute their loss: 'whole' keeps the logits of all tokens, which is faster;
    # 'chunked' computes them a tile at a time, twice. 'auto': whole where the plan says that they fit. Others: 'auto'.
    loss="auto",
    # Compile the model with torch.compile: minutes at the start, faster steps later. 'deepcompile': DeepSpeed's passes
    # besides, which gather weights and reduce gradients inside the compiled graph; for ZeRO 1 to 3 on NVIDIA GPUs.
    torch_compile=False,
    # Ranks that share each sample: every one has its part of the tokens, and computes its part of the attention's heads
    # (docs/long-context.md). 1: every rank has samples of its own.
    sequence_parallel_size=1,
    # Compute each layer's MLP some tokens at a time, and once more in the backward pass: for long rows.
    tiled_mlp=False,
    # Keep the activations in the host's memory between forward and backward pass, as TRL does; needs GPUs.
    activation_offloading=False,
    # Seconds without any progress (a micro-batch, a validation step, bytes loaded or saved) after which the ranks leave
    # their stacks in their logs and the run ends with code 124. Longer than the longest single micro-batch takes.
    hang_timeout=1800,
)

checkpoint = dict(
    # Optimizer steps between checkpoints.
    interval=500,
    # Checkpoints to keep; older ones are removed.
    max_keep_ckpts=2,
    # 'eval_loss' (or 'auto'): save at each lower validation loss, keep the best and end with its weights. None: do not.
    save_best=None,
)

log = dict(
    # Optimizer steps between lines of metrics.jsonl.
    interval=10,
    # Of transformers' integrations: 'tensorboard', 'wandb', 'mlflow', 'trackio', 'comet_ml', 'swanlab', 'clearml'.
    trackers=(),
    # Validation prompts answered after training, by the result and by the model before it; rank 0 loads both anew.
    num_samples=0,
)

# The one seed of weights, data order and dropout.
randomness = dict(seed=42)

# A preset's name, a path to a DeepSpeed config, 'auto' (the lowest level that fits) or 'none'; dict(base=...) changes
# values of one. --deepspeed wins.
deepspeed = "auto"
