"""WizardLM's Evol-Instruct V2: 143,000 conversations; MIT."""

train_dataloader = dict(dataset=dict(path="WizardLM/WizardLM_evol_instruct_V2_196k", format="sharegpt"))
