"""OpenAssistant conversations in many languages, the Guanaco selection; 9,846 rows."""

train_dataloader = dict(dataset=dict(path="timdettmers/openassistant-guanaco", format="oasst1"))
