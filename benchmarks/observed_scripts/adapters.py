"""LoRA on a Llama of the transformers library: the base is frozen."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 4000,
}
config = LoraConfig(
    task_type="CAUSAL_LM", r=8, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
)
model = get_peft_model(LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes)), config)
model.train()
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
for _ in range(6):
    tokens = torch.randint(4000, (4, 128))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
