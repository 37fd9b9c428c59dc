from twinkle_core.data.dataloader import DataLoader as DataLoader
