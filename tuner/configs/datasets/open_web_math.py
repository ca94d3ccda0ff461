"""OpenWebMath: 6,315,233 web pages with mathematics; plain text; ODC-BY."""

train_dataloader = dict(dataset=dict(path="open-web-math/open-web-math", format="text"))
