"""Work with the tools that people train and track by: Hugging Face's Trainer, MLflow. Each module is imported by who has the tool."""
