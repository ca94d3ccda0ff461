"""LLaVA 1.5's mixture of 665,298 conversations, most of them about images, which are separate downloads."""

train_dataloader = dict(
    dataset=dict(
        path="./data/llava_data/LLaVA-Instruct-150K/llava_v1_5_mix665k.json",
        format="llava",
        image_folder="./data/llava_data/llava_images",
    )
)
