"""Every default, once. A recipe starts from this file; its parts and its own values override it."""

model = dict(
    # The weights to start from: a folder, or an id on the Hugging Face hub.
    path=None,
    # A branch, tag or commit of a hub id. None: the newest.
    revision=None,
    # A name (tuner list), a path to a .jinja file, or the template itself. None: the tokenizer's own.
    chat_template=None,
    # Values of names that the chat template uses: dict(enable_thinking=False). None: the template's own. A column
    # chat_template_kwargs has those of its row.
    chat_template_kwargs=None,
    # 'sdpa', 'eager', 'varlen', 'flash_attention_2' ... None: transformers' choice. 'auto': flash attention if the
    # GPUs, the packages, the compute type and the model support it, else 'varlen' for packed rows, else None.
    attn_implementation="auto",
    # Liger's fused kernels for norms, rotary embeddings and MLPs. 'auto': if there are GPUs and liger-kernel.
    use_liger_kernel="auto",
    # Of a model_type that no test of tuner knows: the attention with which a trial has shown that samples of one row do
    # not see each other. A run tries it when it starts, and sets it; a value of yours is replaced.
    packs_with=None,
    # Remote code of a model runs only when this is True and `revision` is a full 40-digit commit.
    trust_remote_code=False,
    # True for models that transformers does not include: their code is only on the hub.
    remote_code=False,
    # Add rows to the embeddings if the tokenizer has more tokens than rows. False: such a tokenizer is an error.
    resize_embeddings=False,
    # Mixture of experts: weight of the router's load-balancing loss. None: the model's own; 0: off.
    router_aux_loss_coef=None,
    # True: the model reads images too. 'auto': if its config.json has a vision tower. False: only its LLM is loaded.
    images="auto",
    # Join a vision tower to an LLM (docs/vision.md): dict(path='openai/clip-vit-large-patch14-336', projector=None,
    # feature_layer=-2, pad_to_square=False, seed=0). None: the model in `path` stays as it is.
    vision=None,
    # Parts of a vision-language model that are not trained: 'vision' (the tower), 'projector', 'language' (the LLM).
    # With an adapter the tower and the projector are frozen, unless adapter.vision=True.
    freeze=(),
    # LoRA on the tower's linear layers, while the other parts are trained whole: dict(r=64, lora_alpha=16,
    # lora_dropout=0.05). At the end it is merged into the tower. With an adapter on the LLM: adapter.vision=True.
    vision_lora=None,
)

# Facts about the model that planning needs, under the keys of its config.json. They belong to model.path: change
# both. None: read them from model.path.
architecture = None

# dict(bits=4, quant_type='nf4', double_quant=True, experts=True): the base model's weights in 4 bits, those of a
# mixture's experts too. None: not quantized.
quantization = None

# dict(r=16, lora_alpha=32, lora_dropout=0.0, target_modules='all-linear', use_dora=False), in PEFT's names. All linear
# layers: "LoRA Without Regret" (Thinking Machines, 2025). Rank, alpha and dropout: measured (docs/learning.md).
# init_lora_weights: True, 'gaussian', 'orthogonal', 'olora', 'pissa', 'pissa_niter_4'.
# path='runs/sft' continues that adapter, with its own r, lora_alpha and target_modules.
# None: all weights are trained.
adapter = None

# The objective: 'sft' trains on the assistant's turns, 'pretrain' on every token of plain text; others learn from pairs
# of answers, from single ones marked good or bad, or from completions (docs/recipes.md). Settings have TRL's names.
objective = dict(type="sft")

train_dataloader = dict(
    # Micro-batch: samples (packed rows, with packing) per process and forward pass. 'auto': the fastest that fits, at
    # the same global batch (docs/plan.md), so the result stays the same.
    batch_size="auto",
    # Workers per rank that collate batches. A model that reads images has 2, which decode and resize them.
    num_workers=0,
    dataset=dict(
        # A .json, .jsonl, .csv, .txt, .parquet or .arrow file (text also as .gz, .zst or .bz2), a folder of them, a
        # pattern ('data/*.jsonl'), an id on the Hugging Face hub, or files there ('hf://datasets/OWNER/NAME/*.json').
        path=None,
        # A configuration of a hub data set, such as 'main'.
        name=None,
        # A split of the data set.
        split="train",
        # The row format: docs/own-data.md lists them. None: detected from the columns.
        format=None,
        # A format's column -> this data set's: dict(prompt='question'), or a text of several: '{context}\n{question}'.
        columns=None,
        # A system prompt for conversations that have none.
        system=None,
        # The folder that the paths of images begin in; none may leave it. None: the folder of the rows' file.
        image_folder=None,
        # Several data sets instead of path: [dict(part='alpaca'), dict(path='my.jsonl', weight=2)]. weight 0.5 takes
        # half of a data set's rows, 2 takes each row twice; max_rows takes only its first rows.
        mixture=None,
        # Use only this many rows, from the first. None: all.
        max_rows=None,
        # Hold out this share of the rows (0.05) for validation. None: nothing. 'auto': about 5 % (docs/own-data.md).
        val_split=None,
        # Seed that chooses those rows. None: randomness.seed.
        val_seed=None,
        # Rows with the same question and answer: 'together' on one side of the split, or 'apart', where their places
        # fall: copies of training rows may then be held out. None: 'together'.
        val_copies=None,
        # True only in val_dataloader: use the rows that val_split holds out. val_split sets it.
        held_out=False,
        # Skip and list up to this many bad rows (truncated, not UTF-8, of another format); more are an error.
        bad_rows=0,
        # Tokens. A longer sample is split when packing, else truncated (and counted).
        max_length=2048,
        # Fill rows of max_length with whole samples, best fit first; samples never attend to each other.
        packing=True,
        # Fill packed rows to this many tokens; a longer sample gets its own row. None: max_length. 'auto': short enough
        # for a run of 1,000 optimizer steps. 1,000 rows learned more in 1,000 steps of one row than in 131 steps of 512
        # tokens, and more in these than in 35 steps of 2,048 (docs/learning.md).
        pack_length="auto",
        # Processes that tokenize rows; the result is the same with any number. 'auto': one per available core, and only
        # one for a few thousand rows.
        num_proc="auto",
        # 'auto': use fastokens if it is installed and gives the same tokens as 'tokenizers'. 'tokenizers': do not use
        # fastokens.
        tokenizer_backend="auto",
        # The thinking of answers: 'strip' removes it, 'last' keeps it only in the last answer, 'keep' keeps all of it
        # and rejects rows if the chat template would drop it. None: as the template does; changes are counted.
        thinking=None,
        # True: special tokens that a plain text spells ('<|im_end|>') become tokens, for a corpus that is rendered
        # already. False: they stay text, and are counted. Rows that are conversations always keep them as text.
        special_tokens=False,
        # The turns that carry loss: 'all' of the assistant's; the 'last' answer, with the calls of tools before it;
        # those that are 'marked' ("weight": 1 in a turn, or spans of it); or 'everything', prompts too. A turn with the
        # weight 0 carries none, one with 0.5 half of it (docs/choosing-turns.md).
        trained_turns="all",
        # True: prepare rows during training, in blocks of 16,384 rows (a number sets another size). Used blocks are
        # removed, so a data set of any size fits the disk (docs/own-data.md). Needs train_cfg.max_steps.
        streaming=False,
        # Larger images are made smaller, to this many pixels: with models that take images of any size (Qwen-VL) they
        # become fewer tokens. None: as the model's processor does.
        image_max_pixels=None,
        # Smaller images are made larger, to this many pixels. None: as the model's processor does.
        image_min_pixels=None,
    ),
)

# The same keys as train_dataloader. None: no validation.
val_dataloader = None

optim_wrapper = dict(
    optimizer=dict(
        # A class of torch.optim, bitsandbytes or DeepSpeed: docs/deepspeed.md lists them.
        type="AdamW",
        # The peak learning rate. Of all weights, at every size of model: sources and figures are in docs/learning.md.
        lr=2e-5,
        # Adam's decay rates of the two moments.
        betas=(0.9, 0.999),
        # Added to the denominator of Adam's update.
        eps=1e-8,
        # Decoupled from the gradient, or added to it (L2): docs/deepspeed.md says which for each optimizer.
        weight_decay=0.0,
        # The learning rate of the matrices that Muon trains; lr is then that of the other weights. None: lr for all.
        muon_lr=None,
        # LoRA+: the learning rate of an adapter's B matrices as a multiple of that of its A matrices. None: the same.
        loraplus_lr_ratio=None,
        # The learning rate of a vision-language model's projector. None: lr, as for the other weights.
        projector_lr=None,
    ),
    # The gradient's 2-norm is clipped to this. None: not clipped.
    clip_grad=dict(max_norm=1.0),
    # Micro-batches per optimizer step. Global batch = batch_size x accumulative_counts x processes. 'auto': the
    # global batch divided by the rest.
    accumulative_counts="auto",
    # 'bf16', 'fp16', 'fp32'. 'auto': bf16 if every GPU has compute capability 8.0 or more, else fp16; fp32 on a CPU.
    dtype="auto",
)

param_scheduler = dict(
    # The learning rate schedule: 'cosine', 'linear', 'constant', 'cosine_with_restarts', 'polynomial', 'inverse_sqrt',
    # 'warmup_stable_decay' (arXiv 2404.06395).
    type="cosine",
    # Share of all steps over which the rate rises. The first of w such steps has 1/w of the rate, not 0.
    warmup_ratio=0.03,
    # The same as a number of steps; of warmup_ratio and warmup_steps the later one counts. None: warmup_ratio applies.
    warmup_steps=None,
    # Of 'cosine' and 'warmup_stable_decay': the rate at the end as a part of lr, such as 0.1.
    min_lr_ratio=0.0,
    # Of 'warmup_stable_decay': the share of all steps over which the rate falls at the end. 0.1 is usual.
    decay_ratio=None,
    # Of 'warmup_stable_decay': how the rate falls: as half a 'cosine', 'linear', or steeply at first as '1-sqrt'
    # (arXiv 2405.18392).
    decay_type="cosine",
    # Of 'cosine_with_restarts': how often the rate falls from lr to 0. 2 or more.
    num_cycles=None,
)

train_cfg = dict(
    # Epochs: passes over the rows.
    max_epochs=3,
    # Optimizer steps. A number here overrides max_epochs. None: max_epochs applies.
    max_steps=None,
    # Optimizer steps between validations; below 1: a share of all steps. None: at the end of each epoch.
    val_interval=None,
    # Stop after this many validations without a lower loss. None: no early stopping.
    early_stopping_patience=None,
    # Train only this many decoder layers, the last ones, and freeze the rest. None: all.
    trainable_layers=None,
    # Batch size: samples (packed rows, with packing) per optimizer step over all processes. None: batch_size x
    # accumulative_counts x processes, with 'auto' as 1 and as 16. 'auto': small enough for a run of 1,000 or
    # more optimizer steps, at most 32,768 tokens or 16 samples (QLoRA's batch, arXiv 2305.14314, table 9).
    global_batch_size="auto",
    # Recompute activations in the backward pass: less memory, about a third more time. 'auto': only where needed.
    gradient_checkpointing="auto",
    # Of the decoder layers recompute only so many, the first ones. None: all. 'auto': where gradient_checkpointing is
    # 'auto' too, as few as leave a tenth of each GPU free; else all.
    recomputed_layers=None,
    # How an objective computes its loss that can do so in chunks (docs/recipes.md): 'whole' keeps the logits of all
    # tokens; 'chunked' computes them tile by tile, once or twice. 'auto': chunked on a GPU, and where that computes
    # each logit once; else whole on a CPU, if the plan says that they fit. Other objectives: 'auto'.
    loss="auto",
    # Compile the model with torch.compile: minutes at the start, faster steps later. 'deepcompile': also DeepSpeed's
    # passes, which gather weights and reduce gradients inside the compiled graph; for ZeRO 1 to 3 on NVIDIA GPUs.
    torch_compile=False,
    # Sequence parallelism: ranks that share each sample. Each has part of the tokens and computes part of the attention
    # heads (docs/long-context.md). 1: every rank has its own samples.
    sequence_parallel_size=1,
    # Tensor parallelism (DeepSpeed's AutoTP): ranks that share each matrix of the layers and see the same samples; also
    # --ds autotp_size=2 (docs/deepspeed.md). 1: every rank has whole matrices, or ZeRO's shards of them.
    autotp_size=1,
    # Compute each layer's MLP in chunks of tokens, and again in the backward pass: for long rows.
    tiled_mlp=False,
    # Keep activations in host memory between forward and backward pass, with TRL's offloading; needs GPUs.
    activation_offloading=False,
    # Seconds without progress (a micro-batch, a validation step, bytes loaded or saved) after which the ranks log their
    # stacks and the run ends with code 124. 'auto': in a step, 10 times the slowest one and at least 300, once 10 steps
    # are measured; 1800 before that, and in the start, a save (or 10 times the slowest), a validation, a generation. A
    # number holds for all of them.
    hang_timeout="auto",
    # Your own classes of transformers' TrainerCallback, 'my_package.my_module:MyCallback'. Each rank makes one of each,
    # without arguments; the module must be on PYTHONPATH (docs/python.md).
    callbacks=(),
)

checkpoint = dict(
    # Optimizer steps between checkpoints; below 1: a share of all steps.
    interval=500,
    # Checkpoints to keep; older ones are removed.
    max_keep_ckpts=2,
    # 'eval_loss' (or 'auto'): save at each lower validation loss, keep the best and end with its weights. None: do not,
    # unless tuner itself holds rows out and trains an adapter.
    save_best=None,
    # OWNER/NAME on the Hugging Face hub: the result is pushed there at the end. None: it is not. --push sets it.
    repository=None,
    # Create that repository private if it does not exist.
    private=False,
    # Push the weights of every checkpoint too, while training goes on.
    push=False,
)

log = dict(
    # Optimizer steps between lines of metrics.jsonl. 'auto': 1 in a run of under 100 steps, else 10. The first step,
    # the last one and those that validate or save are always logged.
    interval="auto",
    # Integrations of transformers: 'tensorboard', 'wandb', 'mlflow', 'trackio', 'comet_ml', 'swanlab', 'clearml'.
    trackers=(),
    # Validation prompts to answer after training, by the result and by the model before training; rank 0 loads both.
    # 'auto': five, as many as are answered in a tenth of the run and in a minute (tuner/worker/samples.py).
    num_samples="auto",
    # Validation prompts to answer at every validation, greedily: exact match, ROUGE-L and BLEU in metrics.jsonl, the
    # answers in answers.jsonl. 0: none. ROUGE-L and BLEU need pip install 'tuner-deepspeed[metrics]'.
    generate=0,
    # The most tokens of such an answer.
    max_new_tokens=128,
    # A command that runs when the run is done, failed or stopped, with the facts as JSON on its standard input: a
    # line, or a list of words; no shell reads it. None: nothing runs. In a file it needs --allow-code (docs/runs.md).
    notify=None,
)

# Seed of weights, data order and dropout.
randomness = dict(seed=42)

# A preset's name, a path to a DeepSpeed config, 'auto' (the fastest level that fits) or 'none'; dict(base=...) changes
# values of one. --deepspeed overrides it.
deepspeed = "auto"
