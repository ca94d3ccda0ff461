"""COIG-P: Chinese preference pairs of six fields."""

train_dataloader = dict(dataset=dict(path="m-a-p/COIG-P", format="preference"))
