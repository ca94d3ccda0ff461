"""Mistral-7B on SkyPile with less dropout, as XTuner trains it."""

_base_ = "mistral_7b_qlora_skypile_pretrain_e1"

adapter = dict(lora_dropout=0.05)
