"""The OpenAssistant conversations, under the name that XTuner gave them beside an MMLU test."""

# The data of oasst1; MMLU itself is no training data.
train_dataloader = dict(dataset=dict(path="timdettmers/openassistant-guanaco", format="oasst1"))
