"""LLaVA's 665,298 conversations, and RefCOCO's boxes in about 140 thousand questions; images are separate downloads."""

train_dataloader = dict(
    dataset=dict(
        mixture=[
            dict(
                path="./data/llava_data/RefCOCOJson/train.json",
                format="refcoco",
                image_folder="./data/llava_data/llava_images",
                weight=0.22,
            ),
            dict(
                path="./data/llava_data/RefCOCOJson/train.json",
                format="inv_refcoco",
                image_folder="./data/llava_data/llava_images",
                weight=0.22,
            ),
            dict(part="llava_instruct"),
        ]
    )
)
