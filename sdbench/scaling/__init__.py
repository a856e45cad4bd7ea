"""How does throughput grow with GPUs, and what do days, money and energy follow from it?"""
