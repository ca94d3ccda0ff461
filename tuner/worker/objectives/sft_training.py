"""SFT: TRL's SFTTrainer on rows that are prepared and packed already."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from trl import SFTConfig, SFTTrainer

from tuner.data import batches
from tuner.data.encoder import Row
from tuner.data.layouts import IMAGES
from tuner.data.sample import IGNORED
from tuner.errors import Key, ModelError
from tuner.recipes.schema import LOADERS, RecipeConfig
from tuner.recipes.schema.architecture import VARLEN
from tuner.worker import compat, loss
from tuner.worker.noise import LENGTHS, EmbeddingNoise
from tuner.worker.objectives import Training
from tuner.worker.step_log import logs_step
from tuner.worker.trainers import UNIT, TunerTrainer, weight_of


class Sft(TunerTrainer, SFTTrainer):  # type: ignore[misc]
    """SFT and pre-training. The loss is normalised by the weight of the step's trained tokens: 1 of each by default.

    TRL gathers four counts a micro-batch over all ranks and waits for them, for metrics that are logged later. This
    trainer measures only in the steps that are logged, without a collective a micro-batch.
    """

    weighs_rows = False
    loss_is_scaled_for_ga = True  # else transformers divides by the micro-batches too, where ranks share samples
    logged_metrics = ("entropy", "is_top1")
    weighs_by_probability = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.metrics: list[str] = []
        """What the head measures beside the loss."""
        base = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        loss.compute_once(base, self.metrics)
        self._sums: list[Tensor] = []

    @staticmethod
    def stand_in(row: dict[str, Any]) -> dict[str, Any]:
        ids = row["input_ids"][:2]
        no_images: Row = {IMAGES: []} if IMAGES in row else {}
        return {"input_ids": ids, "labels": [IGNORED] * len(ids), "seq_lengths": [len(ids)], **no_images}

    def loss_of_objective(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the weighed sum over trained tokens divided by their weight in the step; ranks take the mean of it."""
        if not self.model.training:
            self.metrics[:] = self.logged_metrics
            return self._loss_of_validation(model, inputs, return_outputs, num_items_in_batch)
        is_logged = logs_step(self.state.global_step + 1, self.args, self.state)
        self.metrics[:] = self.logged_metrics if is_logged else ()
        router = {"output_router_logits": True} if self.aux_loss_enabled else {}
        lengths_BT = inputs.pop(LENGTHS, None)
        with self.noise.on(lengths_BT, self.state.global_step) if self.noise else nullcontext():
            outputs = model(
                **inputs,
                **router,
                use_cache=False,
                fused_lm_head=True,
                num_trained=self.trained_of_batch,
                by_probability=self.weighs_by_probability,
            )
        mean = outputs.loss / num_items_in_batch * self.args.world_size
        if self.aux_loss_enabled:
            mean = mean + self.router_aux_loss_coef * outputs.aux_loss * self._share_of_rows()
        if is_logged:
            self._measure(outputs)
        return mean

    def _loss_of_validation(self, model: Any, inputs: dict[str, Any], *options: Any) -> Any:
        """Return TRL's loss, which weighs each token as 1; with weights, the head's sum divided by their sum."""
        if (weight := weight_of(inputs)) is None:
            return super().loss_of_objective(model, inputs, *options)
        sums: list[Tensor] = []

        def keeping_the_sum(**arguments: Any) -> Any:
            outputs = model(**arguments)
            sums.append(outputs.loss)
            return outputs

        super().loss_of_objective(keeping_the_sum, inputs, *options)
        return sums[0] * UNIT / max(weight, 1)

    def _share_of_rows(self) -> Tensor | float:
        """Return this micro-batch's part of the step's rows, of which ranks take the mean; a stand-in has none."""
        if self.rows_of_batch is None:
            return 1 / float(self.current_gradient_accumulation_steps)
        share: Tensor = self.rows_of_batch * self.args.world_size / self.rows_of_step
        return share

    def _measure(self, outputs: Any) -> None:
        aux_loss = outputs.aux_loss.detach() if self.aux_loss_enabled else outputs.log_probs.new_zeros(())
        counts = (outputs.entropy.detach(), outputs.is_top1, outputs.label_mask)
        num_rows = aux_loss.new_tensor(1 if self.rows_of_batch is None else self.rows_of_batch).float()
        self._sums.append(
            torch.stack([*(count.sum().float() for count in counts), aux_loss.float() * num_rows, num_rows])
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._sums and self.model.training:
            sums = self.accelerator.reduce(torch.stack(self._sums).sum(0))
            entropy, num_right, num_tokens, aux_loss, num_rows = sums.tolist()
            metrics = {"entropy": entropy / max(num_tokens, 1), "mean_token_accuracy": num_right / max(num_tokens, 1)}
            logs |= metrics | ({"aux_loss": aux_loss / num_rows} if self.aux_loss_enabled else {})
            self._sums.clear()
        super().log(logs, start_time)


class SftTraining(Training):
    """The rows come tokenized and packed; position_ids keep the samples of a row apart, or rows are padded."""

    def before(self, arguments: Any, config: RecipeConfig, model: Any) -> None:
        """Let the rows of a batch lie end to end if the model keeps them apart; otherwise they are padded.

        Raises:
            ModelError: they are packed, and which model it is was not known before it was loaded.
        """
        varlen = config.model.attn_implementation == VARLEN
        is_tried = config.model.packs_with == compat.attention_of(model)
        arguments.padding_free = batches.lays_end_to_end(
            model, reads_images=config.reads_images, varlen=varlen, is_tried=is_tried
        )
        for key in () if arguments.padding_free else LOADERS:
            loader = getattr(config, key)
            if loader and loader.dataset.packing:
                kind = model.config.get_text_config().model_type
                where = f"{key}.dataset.packing"
                raise ModelError(
                    f"packed samples may attend to each other in a {kind} model",
                    where=where,
                    fix=f"Pad them instead: {Key(where, False)}.",
                )

    def after(self, built: Any, config: RecipeConfig) -> None:
        """Set what the gradient is of and its noise, and let a batch stand side by side where that is faster."""
        built.weighs_by_probability = config.objective.weighs_by_probability
        if alpha := getattr(config.objective, "neftune_noise_alpha", None):
            base = built.model.get_base_model() if isinstance(built.model, PeftModel) else built.model
            embedding, seed = base.get_input_embeddings(), config.randomness.seed
            built.noise = EmbeddingNoise(embedding, alpha, seed, built.args.process_index)
        if config.train_cfg.sequence_parallel_size == 1:
            # The loss that balances a router would be one of padding too.
            needs_mask = compat.needs_mask(built.model) and not built.aux_loss_enabled
            built.data_collator = batches.SampleCollator(built.data_collator, needs_mask)
        built.data_collator = batches.WeighedCollator(built.data_collator)

    def whole_logit_metrics(self, built: Sft, config: RecipeConfig) -> list[str]:
        """Return the list that the trainer fills in steps that are logged."""
        return built.metrics


TRAINING = SftTraining(
    Sft, SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, packing=False, shuffle_dataset=False
)
