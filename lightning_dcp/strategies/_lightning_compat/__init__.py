"""Every private name of Lightning that the strategies touch, with reasons; one module a purpose."""
