"""Human-sounding answers against formal ones; 10,884 pairs."""

train_dataloader = dict(dataset=dict(path="HumanLLMs/Human-Like-DPO-Dataset", format="preference"))
