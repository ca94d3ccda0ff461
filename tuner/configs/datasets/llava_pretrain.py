"""LLaVA-Pretrain: 558,128 images with captions by BLIP; its images are a separate download."""

train_dataloader = dict(
    dataset=dict(
        path="./data/llava_data/LLaVA-Pretrain/blip_laion_cc_sbu_558k.json",
        format="llava",
        image_folder="./data/llava_data/LLaVA-Pretrain/images",
    )
)
