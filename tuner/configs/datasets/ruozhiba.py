"""COIG-CQIA's ruozhiba: Chinese trick questions; a few hundred rows."""

train_dataloader = dict(dataset=dict(path="m-a-p/COIG-CQIA", name="ruozhiba", format="alpaca"))
