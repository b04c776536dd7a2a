"""From a module, a sample and a budget to a plan that has run one real step."""
