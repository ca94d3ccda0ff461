"""WizardLM's first Evol-Instruct; 70,000 instructions."""

train_dataloader = dict(dataset=dict(path="WizardLM/WizardLM_evol_instruct_70k", format="alpaca"))
