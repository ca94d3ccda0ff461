"""COIG-CQIA: Chinese instructions of high quality, thirteen sources."""

train_dataloader = dict(
    dataset=dict(
        mixture=[
            dict(path="m-a-p/COIG-CQIA", name="chinese_traditional", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="coig_pc", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="douban", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="exam", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="finance", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="human_value", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="logi_qa", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="ruozhiba", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="segmentfault", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="wiki", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="wikihow", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="xhs", format="alpaca"),
            dict(path="m-a-p/COIG-CQIA", name="zhihu", format="alpaca"),
        ]
    )
)
