"""ShareGPT4V: 1.2 million images with long captions; its images are separate downloads."""

train_dataloader = dict(
    dataset=dict(
        path="./data/sharegpt4v/share-captioner_coco_lcs_sam_1246k_1107.json",
        format="llava",
        image_folder="./data/sharegpt4v/data",
        max_length=4096,
    )
)
